"""Maps the bytes of one worker to those of another, by the model's layers and heads and a prompt's tokens. Pure.

Three words name a hand-off's geometry, from the model down to memory:

* a *cell* is K and V of one KV head in one layer and one unit of tokens; a `CellRange` is a box of them;
* a *unit* is as many tokens as the smaller block of the two workers has, so that it lies within one block of either;
* a *run* is contiguous bytes of a region; `Runs` are those of a `CellRange` in one pool, plane by plane, where a plane
  is one layer of one rank.

Nothing here compares sizes of tensor-parallel groups. Each side locates a global head; ranges of heads are cut wherever
either side's ranks change. A head that several ranks hold is read from one of them and lands in one of them, a
different one from layer to layer; the receiving side then copies it to the others.

The wire has one order: by layer, then by range of heads that lies within one rank of either side, then by unit; in a
unit K before V, heads, tokens, and all codes before their scales. Padding is not sent. Either side can therefore find
its own runs knowing the other's layout, but neither its blocks nor its addresses.

A worker's pool may be in several regions, each in another process; then a mapping is of one lane (lanes.py) and has its
cells only.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import LocalHeads, RegionGeometry, TokenBlocks
from kv_transfer.layout.lanes import lanes_between
from kv_transfer.layout.runs import Run, RunPairs, Runs, pair_runs
from kv_transfer.layout.strided_table import StridedLayoutTable
from tandem.errors import TransferError
from tandem.values.kv_agreement import agree
from tandem.values.kv_layout import KVLayout, code_bytes, scale_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Shape of the bytes of a `CellRange` in the order of the wire, for any dtype."""

    first_layer: int
    num_layers: int
    head_ranges: tuple[tuple[int, int], ...]
    """(first head, number of heads), in order; within a layer each range comes with all its units."""
    num_units: int
    unit_tokens: int
    head_dim: int

    @property
    def num_vectors(self) -> int:
        """Vectors of `head_dim` values: K and V of every token, head and layer."""
        heads = sum(count for _, count in self.head_ranges)
        return 2 * self.num_layers * heads * self.num_units * self.unit_tokens

    def num_bytes(self, dtype: str) -> int:
        """Bytes in `dtype`, with scales if it has them."""
        return self.num_vectors * vector_bytes(dtype, self.head_dim)


def vector_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one token of one head of K or V on the wire."""
    return code_bytes(dtype, head_dim) + scale_bytes(dtype, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadRange:
    """A range of heads, within one rank of either side, as each side stores it."""

    source: LocalHeads
    destination: LocalHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitHeads:
    """Heads split into ranges that lie within one rank of either side, and the planes of these over all layers."""

    head_ranges: tuple[tuple[int, int], ...]
    distinct: tuple[_HeadRange, ...]
    """The ranges that differ in how they are stored; the last number of each tuple below is an index into these."""
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int, int], ...]
    fan_out: tuple[tuple[int, int, int], ...]


class CellMapping:
    """Maps the cells of a lane from one layout to another of the same model; computed once for a pair of workers."""

    __slots__ = (
        "_all_heads",
        "_destination",
        "_head_dim",
        "_last_runs",
        "_source",
        "_tables",
        "lane",
        "num_layers",
        "same_dtype",
        "unit_tokens",
    )

    def __init__(self, source: KVLayout, destination: KVLayout, *, lane: int = 0) -> None:
        """Raises TransferError, naming the field, for layouts that do not agree, and for a lane that there is not."""
        if reason := agree(source, destination):
            raise TransferError(reason)
        lanes = lanes_between(source, destination)
        if not 0 <= lane < len(lanes):
            raise TransferError(f"lane {lane} of {len(lanes)}")
        self.lane = lanes[lane]
        self._source = RegionGeometry(source, self.lane.source)
        self._destination = RegionGeometry(destination, self.lane.destination)
        self.num_layers, self._head_dim = source.num_layers, source.head_dim
        self.same_dtype = source.dtype == destination.dtype
        """Whether bytes can be copied without conversion."""
        self.unit_tokens = min(source.block_size, destination.block_size)
        self._all_heads = self._split(self.lane.first_head, self.lane.num_heads)
        self._tables: tuple[StridedLayoutTable, StridedLayoutTable] | None = None
        self._last_runs: dict[str, tuple[tuple[object, ...], tuple[tuple[Run, ...], ...]]] = {}

    def contains(self, cells: CellRange) -> bool:
        """Whether `cells` is not empty and its layers and heads are the lane's; the number of units is not checked."""
        return self.lane.contains(cells)

    def payload(self, cells: CellRange) -> Payload:
        """The payload of `cells`. Raises TransferError when they are not the model's."""
        return Payload(
            first_layer=cells.first_layer,
            num_layers=cells.num_layers,
            head_ranges=self._heads_of(cells).head_ranges,
            num_units=cells.num_units,
            unit_tokens=self.unit_tokens,
            head_dim=self._head_dim,
        )

    def reads(self, cells: CellRange, at: TokenBlocks) -> Runs:
        """Runs at the source that hold `cells`, each once. Raises TransferError for cells or blocks that it does not
        have."""
        heads = self._heads_of(cells)
        return Runs(
            planes=self._planes_of_layers(cells, heads.reads),
            num_layers=cells.num_layers,
            plane_runs=self._runs_at("source", heads, cells, at),
            plane_bytes=self._source.plane_bytes(at),
        )

    def writes(self, cells: CellRange, at: TokenBlocks) -> Runs:
        """Runs at the destination for the same bytes in the same order. Raises TransferError as `reads` does."""
        heads = self._heads_of(cells)
        return Runs(
            planes=self._planes_of_layers(cells, heads.writes),
            num_layers=cells.num_layers,
            plane_runs=self._runs_at("destination", heads, cells, at),
            plane_bytes=self._destination.plane_bytes(at),
        )

    def run_pairs(self, cells: CellRange, source: TokenBlocks, destination: TokenBlocks) -> RunPairs:
        """Pairs of `reads` and `writes`, to copy between two mapped regions. Raises TransferError also for unequal
        dtypes."""
        if not self.same_dtype:
            raise TransferError("cells of different dtypes are converted, not copied")
        heads = self._heads_of(cells)
        reads = self._runs_at("source", heads, cells, source)
        writes = self._runs_at("destination", heads, cells, destination)
        return RunPairs(
            planes=self._planes_of_layers(cells, heads.copies),
            num_layers=cells.num_layers,
            plane_pairs=tuple(pair_runs(here, there) for here, there in zip(reads, writes, strict=True)),
            source_plane_bytes=self._source.plane_bytes(source),
            destination_plane_bytes=self._destination.plane_bytes(destination),
        )

    def fan_out(self, cells: CellRange, at: TokenBlocks) -> RunPairs:
        """Copies within the destination that pass `cells`, once verified, to all other ranks that hold them."""
        heads = self._heads_of(cells)
        if not heads.fan_out:
            return RunPairs(planes=(), num_layers=0, plane_pairs=(), source_plane_bytes=0, destination_plane_bytes=0)
        plane_runs = self._runs_at("destination", heads, cells, at)
        plane_bytes = self._destination.plane_bytes(at)
        return RunPairs(
            planes=self._planes_of_layers(cells, heads.fan_out),
            num_layers=cells.num_layers,
            plane_pairs=tuple(tuple((begin, begin, size) for begin, size in runs) for runs in plane_runs),
            source_plane_bytes=plane_bytes,
            destination_plane_bytes=plane_bytes,
        )

    def source_table(self, first_head: int, num_heads: int) -> StridedLayoutTable:
        """The data of `reads` for compiled code. Raises TransferError for heads that are not the model's."""
        return self._tables_of(first_head, num_heads)[0]

    def destination_table(self, first_head: int, num_heads: int) -> StridedLayoutTable:
        """The data of `writes` for compiled code. Raises TransferError for heads that are not the model's."""
        return self._tables_of(first_head, num_heads)[1]

    def source_unit(self, at: TokenBlocks) -> int:
        """First unit of the hand-off at the source, relative to the first of `at.blocks`. Raises TransferError."""
        return self._source.first_unit(at, self.unit_tokens)

    def destination_unit(self, at: TokenBlocks) -> int:
        """First unit of the hand-off at the destination, relative to the first of `at.blocks`. Raises TransferError."""
        return self._destination.first_unit(at, self.unit_tokens)

    def _tables_of(self, first_head: int, num_heads: int) -> tuple[StridedLayoutTable, StridedLayoutTable]:
        lane = self.lane
        if num_heads == lane.num_heads and first_head == lane.first_head:
            if self._tables is None:
                self._tables = self._make_tables(self._all_heads)
            return self._tables
        if not (num_heads > 0 and 0 <= first_head - lane.first_head <= lane.num_heads - num_heads):
            raise TransferError("cells outside the model")
        return self._make_tables(self._split(first_head, num_heads))

    def _make_tables(self, heads: _SplitHeads) -> tuple[StridedLayoutTable, StridedLayoutTable]:
        source = StridedLayoutTable(
            heads.reads,
            [one.source.unit_runs for one in heads.distinct],
            num_layers=self.num_layers,
            block_bytes=self._source.layer_block_bytes,
        )
        destination = StridedLayoutTable(
            heads.writes,
            [one.destination.unit_runs for one in heads.distinct],
            num_layers=self.num_layers,
            block_bytes=self._destination.layer_block_bytes,
        )
        return source, destination

    def _runs_at(
        self, side: Literal["source", "destination"], heads: _SplitHeads, cells: CellRange, at: TokenBlocks
    ) -> tuple[tuple[Run, ...], ...]:
        """Runs for each distinct range of heads; cached, because chunks cut by layers repeat the same blocks."""
        first, count = cells.first_unit, cells.num_units
        key = (first, count, cells.first_head, cells.num_heads, at)
        last = self._last_runs.get(side)
        if last is not None and last[0] == key:
            return last[1]
        if side == "source":
            runs = tuple(self._source.runs(first, count, one.source, at) for one in heads.distinct)
        else:
            runs = tuple(self._destination.runs(first, count, one.destination, at) for one in heads.distinct)
        self._last_runs[side] = key, runs
        return runs

    def _planes_of_layers(self, cells: CellRange, planes: tuple[T, ...]) -> tuple[T, ...]:
        if cells.num_layers == self.num_layers:
            return planes
        per_layer = len(planes) // self.num_layers
        return planes[cells.first_layer * per_layer : (cells.first_layer + cells.num_layers) * per_layer]

    def _heads_of(self, cells: CellRange) -> _SplitHeads:
        if not self.contains(cells):
            raise TransferError("cells outside the model")
        if cells.num_heads == self.lane.num_heads:
            return self._all_heads
        return self._split(cells.first_head, cells.num_heads)

    def _split(self, first: int, count: int) -> _SplitHeads:
        here, there = self._source.num_local_heads, self._destination.num_local_heads
        edges = [h for h in range(first + 1, first + count) if h % here == 0 or h % there == 0]
        begins, ends = [first, *edges], [*edges, first + count]
        head_ranges = tuple((begin, end - begin) for begin, end in zip(begins, ends, strict=True))
        stored = [self._head_range(begin, size) for begin, size in head_ranges]
        distinct = tuple(dict.fromkeys(stored))
        indices = [distinct.index(one) for one in stored]
        copies, fan_out = [], []
        for layer in range(self.num_layers):
            for index, head in zip(indices, begins, strict=True):
                landing, *others = self._destination.planes(layer, head)
                copies.append((self._source.planes(layer, head)[0], landing, index))
                fan_out += [(landing, other, index) for other in others]
        return _SplitHeads(
            head_ranges=head_ranges,
            distinct=distinct,
            reads=tuple((source, index) for source, _, index in copies),
            writes=tuple((destination, index) for _, destination, index in copies),
            copies=tuple(copies),
            fan_out=tuple(fan_out),
        )

    def _head_range(self, head: int, count: int) -> _HeadRange:
        return _HeadRange(
            source=self._source.local_heads(head, count, self.unit_tokens),
            destination=self._destination.local_heads(head, count, self.unit_tokens),
        )
