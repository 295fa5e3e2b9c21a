"""Which bytes of one worker are which bytes of another: by the model's heads and layers and a prompt's tokens. Pure.

Nothing here compares sizes of tensor-parallel groups. Each side says where a global head lies; ranges of heads are
cut wherever either side's ranks change, tokens wherever either side's blocks do. A head that several ranks hold is read
from one of them and lands in one of them, a different one from layer to layer; the receiving side then copies it to the
others.

The wire has one order: by layer, then by range of heads that lies within one rank of either side, then by piece of at
most the smaller block size; in a piece K before V, heads, tokens, and in int8 all codes before all scales. Padding
never travels. So either side finds its own runs knowing the other's layout, but neither its blocks nor its addresses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from kv_transfer.layout.cells import (
    SCALE_BYTES,
    KVSlice,
    LocalHeads,
    TokenBlocks,
    UnitRange,
    WorkerGeometry,
    unit_ranges,
)
from kv_transfer.layout.runs import Copies, Copy, Run, Runs, paired
from kv_transfer.layout.strided_table import StridedLayoutTable
from tandem.errors import TransferError
from tandem.values.kv_agreement import agree
from tandem.values.kv_layout import DTYPE_BYTES, KVLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the bytes of a box are, in the order of the wire, whatever their dtype."""

    first_layer: int
    num_layers: int
    head_ranges: tuple[tuple[int, int], ...]
    """(first head, how many), in order: within a layer each comes with all its pieces."""
    unit_ranges: tuple[UnitRange, ...]
    head_dim: int

    @property
    def num_vectors(self) -> int:
        """Vectors of `head_dim` values: K and V of every token, head and layer."""
        heads = sum(count for _, count in self.head_ranges)
        return 2 * self.num_layers * heads * sum(span.num_pieces * span.piece_tokens for span in self.unit_ranges)

    def num_bytes(self, dtype: str) -> int:
        """Bytes in `dtype`, with scales if it has them."""
        return self.num_vectors * vector_bytes(dtype, self.head_dim)


def vector_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one token of one head of K or V on the wire."""
    return head_dim * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype == "int8" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A range of heads as either side numbers and stores it."""

    source: LocalHeads
    destination: LocalHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadCut:
    """A range of heads cut into parts that lie within one rank of either side: its lanes, over all layers."""

    head_ranges: tuple[tuple[int, int], ...]
    shapes: tuple[_Shape, ...]
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int, int], ...]
    fan_out: tuple[tuple[int, int, int], ...]


class CellMapping:
    """From one layout to another of the same model; computed once for a pair of workers."""

    __slots__ = (
        "_all_heads",
        "_destination",
        "_head_dim",
        "_last_patterns",
        "_source",
        "_tables",
        "num_heads",
        "num_layers",
        "same_dtype",
        "unit",
    )

    def __init__(self, source: KVLayout, destination: KVLayout) -> None:
        """Raises TransferError, naming the field, for layouts that do not agree."""
        if reason := agree(source, destination):
            raise TransferError(reason)
        self._source, self._destination = WorkerGeometry(source), WorkerGeometry(destination)
        self.num_layers, self.num_heads, self._head_dim = source.num_layers, source.num_kv_heads, source.head_dim
        self.same_dtype = source.dtype == destination.dtype
        """Whether bytes can be copied as they are."""
        self.unit = min(source.block_size, destination.block_size)
        """Tokens: boxes that begin and end at its multiples have the fewest runs."""
        self._all_heads = self._cut(0, self.num_heads)
        self._tables: tuple[StridedLayoutTable, StridedLayoutTable] | None = None
        self._last_patterns: dict[str, tuple[tuple[object, ...], tuple[tuple[Run, ...], ...]]] = {}

    def box(self, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int | None = None) -> KVSlice:
        """These tokens in all heads, and in all layers from `first_layer` on unless told how many."""
        return KVSlice(
            first_layer=first_layer,
            num_layers=self.num_layers - first_layer if num_layers is None else num_layers,
            first_token=first_token,
            num_tokens=num_tokens,
            first_head=0,
            num_heads=self.num_heads,
        )

    def contains(self, box: KVSlice) -> bool:
        """Whether this is a non-empty box of the model's; how many tokens there are only blocks can say."""
        return (
            box.num_layers > 0
            and box.num_tokens > 0
            and box.num_heads > 0
            and 0 <= box.first_layer <= self.num_layers - box.num_layers
            and 0 <= box.first_head <= self.num_heads - box.num_heads
            and box.first_token >= 0
        )

    def payload(self, box: KVSlice) -> Payload:
        """What travels for `box`. Raises TransferError when it is not the model's."""
        return Payload(
            first_layer=box.first_layer,
            num_layers=box.num_layers,
            head_ranges=self._cut_of(box).head_ranges,
            unit_ranges=unit_ranges(box, self.unit),
            head_dim=self._head_dim,
        )

    def reads(self, box: KVSlice, at: TokenBlocks) -> Runs:
        """Where the source reads `box`, each cell once. Raises TransferError for cells or blocks that it has not."""
        cut = self._cut_of(box)
        return Runs(
            lanes=self._layers_of(box, cut.reads),
            num_layers=box.num_layers,
            patterns=self._patterns_at("source", cut, box, at),
            plane_bytes=self._source.plane_bytes(at),
        )

    def writes(self, box: KVSlice, at: TokenBlocks) -> Runs:
        """Where the same bytes land at the destination, in the same order. Raises TransferError as `reads` does."""
        cut = self._cut_of(box)
        return Runs(
            lanes=self._layers_of(box, cut.writes),
            num_layers=box.num_layers,
            patterns=self._patterns_at("destination", cut, box, at),
            plane_bytes=self._destination.plane_bytes(at),
        )

    def copies(self, box: KVSlice, source: TokenBlocks, destination: TokenBlocks) -> Copies:
        """`reads` and `writes` at once, for whoever sees both regions. Raises TransferError too when dtypes differ."""
        if not self.same_dtype:
            raise TransferError("cells of different dtypes are converted, not copied")
        cut = self._cut_of(box)

        def pattern(shape: _Shape, cuts: tuple[UnitRange, ...]) -> tuple[Copy, ...]:
            return paired(
                self._source.runs(cuts, shape.source, source),
                self._destination.runs(cuts, shape.destination, destination),
            )

        return Copies(
            lanes=self._layers_of(box, cut.copies),
            num_layers=box.num_layers,
            patterns=self._patterns(cut, box, pattern),
            source_plane_bytes=self._source.plane_bytes(source),
            destination_plane_bytes=self._destination.plane_bytes(destination),
        )

    def fan_out(self, box: KVSlice, at: TokenBlocks) -> Copies:
        """Copies within the destination, once `box` has landed and is verified, to all other ranks that hold it."""
        cut = self._cut_of(box)
        if not cut.fan_out:
            return Copies(lanes=(), num_layers=0, patterns=(), source_plane_bytes=0, destination_plane_bytes=0)
        patterns = self._patterns_at("destination", cut, box, at)
        plane_bytes = self._destination.plane_bytes(at)
        return Copies(
            lanes=self._layers_of(box, cut.fan_out),
            num_layers=box.num_layers,
            patterns=tuple(tuple((begin, begin, size) for begin, size in runs) for runs in patterns),
            source_plane_bytes=plane_bytes,
            destination_plane_bytes=plane_bytes,
        )

    def source_table(self, first_head: int, num_heads: int) -> StridedLayoutTable:
        """What `reads` is made of, for compiled code. Raises TransferError for heads that are not the model's."""
        return self._tables_of(first_head, num_heads)[0]

    def destination_table(self, first_head: int, num_heads: int) -> StridedLayoutTable:
        """What `writes` is made of, likewise."""
        return self._tables_of(first_head, num_heads)[1]

    def _tables_of(self, first_head: int, num_heads: int) -> tuple[StridedLayoutTable, StridedLayoutTable]:
        if num_heads == self.num_heads and first_head == 0:
            if self._tables is None:
                self._tables = self._make_tables(self._all_heads)
            return self._tables
        if not (num_heads > 0 and 0 <= first_head <= self.num_heads - num_heads):
            raise TransferError("cells outside the model")
        return self._make_tables(self._cut(first_head, num_heads))

    def _make_tables(self, cut: _HeadCut) -> tuple[StridedLayoutTable, StridedLayoutTable]:
        source = StridedLayoutTable(
            cut.reads,
            [shape.source.pieces for shape in cut.shapes],
            num_layers=self.num_layers,
            block_bytes=self._source.layer_block_bytes,
        )
        destination = StridedLayoutTable(
            cut.writes,
            [shape.destination.pieces for shape in cut.shapes],
            num_layers=self.num_layers,
            block_bytes=self._destination.layer_block_bytes,
        )
        return source, destination

    def _patterns_at(
        self, side: Literal["source", "destination"], cut: _HeadCut, box: KVSlice, at: TokenBlocks
    ) -> tuple[tuple[Run, ...], ...]:
        """The last ones are remembered: chunks that are cut by layers ask for the same blocks one after another."""
        key = (box.first_token, box.num_tokens, box.first_head, box.num_heads, at)
        last = self._last_patterns.get(side)
        if last is not None and last[0] == key:
            return last[1]
        if side == "source":
            patterns = self._patterns(cut, box, lambda shape, cuts: self._source.runs(cuts, shape.source, at))
        else:
            patterns = self._patterns(cut, box, lambda shape, cuts: self._destination.runs(cuts, shape.destination, at))
        self._last_patterns[side] = key, patterns
        return patterns

    def _patterns(
        self, cut: _HeadCut, box: KVSlice, pattern: Callable[[_Shape, tuple[UnitRange, ...]], T]
    ) -> tuple[T, ...]:
        cuts = unit_ranges(box, self.unit)
        return tuple(pattern(shape, cuts) for shape in cut.shapes)

    def _layers_of(self, box: KVSlice, lanes: tuple[T, ...]) -> tuple[T, ...]:
        if box.num_layers == self.num_layers:
            return lanes
        per_layer = len(lanes) // self.num_layers
        return lanes[box.first_layer * per_layer : (box.first_layer + box.num_layers) * per_layer]

    def _cut_of(self, box: KVSlice) -> _HeadCut:
        if not self.contains(box):
            raise TransferError("cells outside the model")
        if box.num_heads == self.num_heads:
            return self._all_heads
        return self._cut(box.first_head, box.num_heads)

    def _cut(self, first: int, count: int) -> _HeadCut:
        here, there = self._source.num_local_heads, self._destination.num_local_heads
        edges = [h for h in range(first + 1, first + count) if h % here == 0 or h % there == 0]
        begins, ends = [first, *edges], [*edges, first + count]
        head_ranges = tuple((begin, end - begin) for begin, end in zip(begins, ends, strict=True))
        cut = [self._shape(begin, size) for begin, size in head_ranges]
        shapes = tuple(dict.fromkeys(cut))
        shape_of = [shapes.index(shape) for shape in cut]
        copies, fan_out = [], []
        for layer in range(self.num_layers):
            for shape, head in zip(shape_of, begins, strict=True):
                landing, *others = self._destination.planes(layer, head)
                copies.append((self._source.planes(layer, head)[0], landing, shape))
                fan_out += [(landing, other, shape) for other in others]
        return _HeadCut(
            head_ranges=head_ranges,
            shapes=shapes,
            reads=tuple((source, shape) for source, _, shape in copies),
            writes=tuple((destination, shape) for _, destination, shape in copies),
            copies=tuple(copies),
            fan_out=tuple(fan_out),
        )

    def _shape(self, head: int, count: int) -> _Shape:
        return _Shape(
            source=self._source.local_heads(head, count, self.unit),
            destination=self._destination.local_heads(head, count, self.unit),
        )
