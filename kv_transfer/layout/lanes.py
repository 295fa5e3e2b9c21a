"""The lanes of a pair of workers: which cells go from which region of one to which region of the other. Pure.

Both workers derive the same lanes from both layouts, so a lane is named by its number alone, and no message has to say
what it carries. A pair with one region on either side has one lane, which carries everything; where windowed layers are
kept apart, one for each group of layers, since a group's blocks are its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from kv_transfer.layout.cell_range import CellRange
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A box of cells of every hand-off between two workers: these layers and heads, in all units."""

    source: int
    """Region of the sender that it is read from."""
    destination: int
    """Region of the receiver that it lands in."""
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    group: int = 0
    """Group of its layers."""

    def contains(self, cells: CellRange) -> bool:
        """Whether these layers and heads are some of the lane's; the number of units is not checked."""
        return (
            cells.num_layers > 0
            and cells.num_units > 0
            and cells.num_heads > 0
            and 0 <= cells.first_layer - self.first_layer <= self.num_layers - cells.num_layers
            and 0 <= cells.first_head - self.first_head <= self.num_heads - cells.num_heads
            and cells.first_unit >= 0
        )


def whole_lane(layout: KVLayout) -> Lane:
    """The lane between two workers of one region."""
    return Lane(
        source=0,
        destination=0,
        first_layer=0,
        num_layers=layout.num_layers,
        first_head=0,
        num_heads=layout.num_kv_heads,
    )


@lru_cache(maxsize=64)  # asked for once for each lane, and of a few pairs of layouts
def lanes_between(source: KVLayout, destination: KVLayout) -> tuple[Lane, ...]:
    """Lanes that bring every head to each region of `destination` that holds it, once, in order of destinations.

    Where several regions of `source` hold a head, each of them sends: to a destination of its own where enough of these
    hold the head, otherwise a band of the layers.
    """
    return tuple(
        Lane(
            source=region,
            destination=there,
            first_layer=first_layer,
            num_layers=num_layers,
            first_head=heads[0],
            num_heads=len(heads),
            group=group,
        )
        for there in range(destination.num_regions)
        for holders, heads in _ranges_of_heads(source, destination, there)
        for group, region, first_layer, num_layers in _bands(holders, source.groups)
    )


def regions_of_head(layout: KVLayout, head: int) -> tuple[int, ...]:
    """Regions that hold a head of the model, in ascending order; it may be several ranks' of one region."""
    num_replicas = max(1, layout.tp_size // layout.num_kv_heads)
    first_rank = head // layout.num_local_kv_heads * num_replicas
    size = layout.ranks_per_region
    return tuple(range(first_rank // size, (first_rank + num_replicas - 1) // size + 1))


def _ranges_of_heads(
    source: KVLayout, destination: KVLayout, there: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Regions of the source that send to region `there`, with the consecutive heads that all of them send."""

    def senders(head: int) -> tuple[int, ...]:
        holders, takers = regions_of_head(source, head), regions_of_head(destination, head)
        own = takers.index(there)
        if len(holders) <= len(takers):
            return (holders[own % len(holders)],)
        return holders[own :: len(takers)]

    held = [head for head in range(destination.num_kv_heads) if there in regions_of_head(destination, head)]
    for holders, heads in groupby(held, senders):
        yield holders, list(heads)


def _bands(holders: tuple[int, ...], groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
    """Each holder with its share of each group's layers: group, region, first layer, number of layers, if there are
    any."""
    begin = 0
    for group, layers in enumerate(groups):
        edges = [begin + len(layers) * share // len(holders) for share in range(len(holders) + 1)]
        begin += len(layers)
        for region, first, end in zip(holders, edges, edges[1:], strict=False):
            if end > first:
                yield group, region, first, end - first
