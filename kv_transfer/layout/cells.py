"""The position of a prompt's layers, units and heads in the bytes of one worker's pool. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.layout.runs import Run, extend
from tandem.errors import TransferError
from tandem.values.ids import BlockId
from tandem.values.kv_layout import KVLayout, code_bytes, scale_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlocks:
    """The physical blocks of a prompt in one worker."""

    blocks: Sequence[BlockId]
    """Physical blocks in the order of the prompt's tokens; distinct."""
    first_block: int = 0
    """Index in the prompt of the first of `blocks`, in blocks of this worker."""
    held_tokens: int = 0
    """Tokens of the prefix that the destination holds already; cells are counted from its end."""
    pool_blocks: int
    """Number of blocks of the worker's whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHeads:
    """Consecutive heads of one rank, and their runs in one block, relative to its beginning."""

    unit_runs: tuple[tuple[Run, ...], ...]
    """Runs for each unit of a block."""
    fill_block: bool
    """Whether these heads fill the whole block in one run."""


class RegionGeometry:
    """The geometry of one region of a worker's pool, independent of any prompt."""

    __slots__ = (
        "_block_size",
        "_code_bytes",
        "_first_rank",
        "_num_ranks",
        "_num_replicas",
        "_plane_of_layer",
        "_planes_per_rank",
        "_scale_bytes",
        "_scale_offset",
        "layer_block_bytes",
        "num_local_heads",
    )

    def __init__(self, layout: KVLayout, region: int) -> None:
        self._num_ranks = layout.ranks_per_region
        self._first_rank = region * self._num_ranks
        self.num_local_heads = layout.num_local_kv_heads
        self._block_size = layout.block_size
        self._code_bytes = code_bytes(layout.dtype, layout.head_dim)
        self._scale_bytes = scale_bytes(layout.dtype, layout.head_dim)
        self.layer_block_bytes = layout.layer_block_bytes
        self._planes_per_rank = layout.planes_per_rank
        self._plane_of_layer = tuple(plane for group in layout.groups for plane in range(len(group)))
        self._num_replicas = max(1, layout.tp_size // layout.num_kv_heads)
        self._scale_offset = layout.scale_offset

    def planes(self, layer: int, head: int) -> tuple[int, ...]:
        """Planes that hold this head of this layer, one per rank of the region; the first rotates from layer to layer.

        Empty for a head that is in other regions only.
        """
        first = head // self.num_local_heads * self._num_replicas
        ranks = [first + (layer + i) % self._num_replicas - self._first_rank for i in range(self._num_replicas)]
        plane = self._plane_of_layer[layer]
        return tuple(rank * self._planes_per_rank + plane for rank in ranks if 0 <= rank < self._num_ranks)

    def plane_bytes(self, at: TokenBlocks) -> int:
        """Bytes of one plane of the region."""
        return at.pool_blocks * self.layer_block_bytes

    def local_heads(self, head: int, count: int, unit_tokens: int) -> LocalHeads:
        """`count` heads from the model's `head` on, all of one rank."""
        first = head % self.num_local_heads
        tokens = range(0, self._block_size, unit_tokens)
        unit_runs = tuple(self._unit_runs(first, count, token, unit_tokens) for token in tokens)
        return LocalHeads(unit_runs=unit_runs, fill_block=unit_runs == (((0, self.layer_block_bytes),),))

    def first_unit(self, at: TokenBlocks, unit_tokens: int) -> int:
        """First unit of the hand-off, relative to the first of `at.blocks`; negative when it lies before that block.

        Raises TransferError when the held prefix does not end with a unit.
        """
        held_units, rest = divmod(at.held_tokens, unit_tokens)
        if rest:
            raise TransferError(f"held_tokens {at.held_tokens} is not a multiple of {unit_tokens}")
        return held_units - at.first_block * (self._block_size // unit_tokens)

    def runs(self, first_unit: int, num_units: int, heads: LocalHeads, at: TokenBlocks) -> tuple[Run, ...]:
        """Runs of `heads` in these units of the hand-off, in one plane and relative to its beginning, in order.

        Raises TransferError for blocks outside the pool or units outside `at.blocks`.
        """
        size, unit_runs = self.layer_block_bytes, heads.unit_runs
        units_per_block = len(unit_runs)
        first = first_unit + self.first_unit(at, self._block_size // units_per_block)
        end = first + num_units
        if first < 0 or end > len(at.blocks) * units_per_block:
            raise TransferError("cells outside the blocks of their prompt")
        first_block = first // units_per_block
        blocks = at.blocks[first_block : -(-end // units_per_block)]
        if min(blocks) < 0 or max(blocks) >= at.pool_blocks:
            raise TransferError("blocks outside the KV region")
        if heads.fill_block:
            return tuple(_adjacent(blocks, size))
        runs: list[Run] = []
        for unit in range(first - first_block * units_per_block, end - first_block * units_per_block):
            extend(runs, unit_runs[unit % units_per_block], blocks[unit // units_per_block] * size)
        return tuple(runs)

    def _unit_runs(self, first: int, count: int, token: int, num_tokens: int) -> tuple[Run, ...]:
        """Runs of a unit: values or codes by K and V, head and token, then scales likewise; `token` is the unit's
        first."""
        runs: list[Run] = []
        sections = [(0, self._code_bytes)]
        if self._scale_offset is not None:
            sections.append((self._scale_offset, self._scale_bytes))
        for base, row_bytes in sections:
            for kv in (0, self.num_local_heads):
                for head in range(kv + first, kv + first + count):
                    slot = head * self._block_size + token
                    extend(runs, [(slot * row_bytes, num_tokens * row_bytes)], base)
        return tuple(runs)


def _adjacent(blocks: Sequence[BlockId], size: int) -> Iterator[Run]:
    """Yield one run for each sequence of consecutive ascending blocks of `size` bytes."""
    first, following = blocks[0], blocks[0]
    for block in blocks:
        if block != following:
            yield first * size, (following - first) * size
            first = following = block
        following += 1  # type: ignore[assignment]
    yield first * size, (following - first) * size
