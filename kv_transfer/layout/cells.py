"""One worker's cells as bytes of its region: where the heads, tokens and layers of a prompt lie in its pool. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.layout.runs import Run, extend
from tandem.errors import TransferError
from tandem.values.ids import BlockId
from tandem.values.kv_layout import DTYPE_BYTES, KVLayout

SCALE_BYTES = 4
"""Of the float32 that one token of one head has beside its codes in int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSlice:
    """A box of cells by what they mean: the model's layers x the prompt's tokens x the model's KV heads, K and V."""

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int

    @property
    def end_token(self) -> int:
        """The token behind the last one."""
        return self.first_token + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlocks:
    """The physical blocks of a prompt in one worker."""

    blocks: Sequence[BlockId]
    """In the order of tokens; those of one prompt are distinct."""
    first_block: int = 0
    """Which block of the prompt `blocks` begins with, counted in this worker's block size."""
    pool_blocks: int
    """Of the worker's whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRange:
    """Consecutive pieces of a prompt, each of equally many tokens and within one block of either side."""

    first_token: int
    num_pieces: int
    piece_tokens: int


def unit_ranges(box: KVSlice, unit: int) -> tuple[UnitRange, ...]:
    """The box's tokens cut at the multiples of `unit`: a partial piece, whole ones, a partial one, as there are."""
    first, end = box.first_token, box.end_token
    if first % unit == 0 and end % unit == 0:
        return (UnitRange(first_token=first, num_pieces=box.num_tokens // unit, piece_tokens=unit),)
    begin_whole, end_whole = -(-first // unit) * unit, end // unit * unit
    if begin_whole > end_whole:
        return (UnitRange(first_token=first, num_pieces=1, piece_tokens=end - first),)
    cuts = (
        UnitRange(first_token=first, num_pieces=1, piece_tokens=begin_whole - first),
        UnitRange(first_token=begin_whole, num_pieces=(end_whole - begin_whole) // unit, piece_tokens=unit),
        UnitRange(first_token=end_whole, num_pieces=1, piece_tokens=end - end_whole),
    )
    return tuple(span for span in cuts if span.piece_tokens and span.num_pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHeads:
    """Some heads as a rank numbers them, and their runs in one block, from its beginning."""

    first: int
    count: int
    pieces: tuple[tuple[Run, ...], ...]
    """For each unit of tokens in a block."""
    whole: bool
    """Whether they are all that a block holds, in one run."""


class WorkerGeometry:
    """The geometry of one worker; knows no prompt."""

    __slots__ = (
        "_block_size",
        "_dtype_bytes",
        "_head_dim",
        "_num_layers",
        "_num_replicas",
        "_scale_offset",
        "layer_block_bytes",
        "num_local_heads",
    )

    def __init__(self, layout: KVLayout) -> None:
        self.num_local_heads = layout.num_local_kv_heads
        self._block_size = layout.block_size
        self._dtype_bytes = DTYPE_BYTES[layout.dtype]
        self._head_dim = layout.head_dim
        self.layer_block_bytes = layout.layer_block_bytes
        self._num_layers = layout.num_layers
        self._num_replicas = max(1, layout.tp_size // layout.num_kv_heads)
        self._scale_offset = layout.scale_offset

    def planes(self, layer: int, head: int) -> tuple[int, ...]:
        """Planes that hold this head of this layer, one for each rank that does; layers begin with different ranks."""
        first = head // self.num_local_heads * self._num_replicas
        ranks = [first + (layer + i) % self._num_replicas for i in range(self._num_replicas)]
        return tuple(rank * self._num_layers + layer for rank in ranks)

    def plane_bytes(self, at: TokenBlocks) -> int:
        """Bytes of one plane of the region."""
        return at.pool_blocks * self.layer_block_bytes

    def local_heads(self, head: int, count: int, unit: int) -> LocalHeads:
        """Global heads `head` and following, all of one rank, in units of so many tokens."""
        first = head % self.num_local_heads
        pieces = tuple(self._piece(first, count, token, unit) for token in range(0, self._block_size, unit))
        whole = pieces == (((0, self.layer_block_bytes),),)
        return LocalHeads(first=first, count=count, pieces=pieces, whole=whole)

    def runs(self, cuts: Sequence[UnitRange], heads: LocalHeads, at: TokenBlocks) -> tuple[Run, ...]:
        """Runs of a plane, from its beginning, for one layer's `heads` and the pieces of `cuts`, in order.

        Raises TransferError when a block is not the worker's.
        """
        runs: list[Run] = []
        size, pieces = self.layer_block_bytes, heads.pieces
        unit = self._block_size // len(pieces)
        for cut in cuts:
            blocks = self._blocks_of(cut, at)
            inside = cut.first_token % self._block_size
            if cut.piece_tokens < unit:
                extend(runs, self._piece(heads.first, heads.count, inside, cut.piece_tokens), blocks[0] * size)
            elif heads.whole:
                extend(runs, _adjacent(blocks, size))
            else:
                for i in range(inside // unit, inside // unit + cut.num_pieces):
                    extend(runs, pieces[i % len(pieces)], blocks[i // len(pieces)] * size)
        return tuple(runs)

    def _piece(self, first: int, count: int, token: int, num_tokens: int) -> tuple[Run, ...]:
        """Codes or values by K and V, head and token, then scales alike; tokens counted from `token` in a block."""
        runs: list[Run] = []
        sections = [(0, self._head_dim * self._dtype_bytes)]
        if self._scale_offset is not None:
            sections.append((self._scale_offset, SCALE_BYTES))
        for base, row_bytes in sections:
            for kv in (0, self.num_local_heads):
                for head in range(kv + first, kv + first + count):
                    slot = head * self._block_size + token
                    extend(runs, [(slot * row_bytes, num_tokens * row_bytes)], base)
        return tuple(runs)

    def _blocks_of(self, cut: UnitRange, at: TokenBlocks) -> Sequence[BlockId]:
        begin = cut.first_token // self._block_size - at.first_block
        last_token = cut.first_token + cut.num_pieces * cut.piece_tokens - 1
        end = last_token // self._block_size - at.first_block + 1
        if begin < 0 or end > len(at.blocks):
            raise TransferError("cells outside the blocks of their prompt")
        blocks = at.blocks[begin:end]
        if min(blocks) < 0 or max(blocks) >= at.pool_blocks:
            raise TransferError("blocks outside the KV region")
        return blocks


def _adjacent(blocks: Sequence[BlockId], size: int) -> Iterator[Run]:
    """One run for each run of adjacent ascending blocks of `size` bytes."""
    first, following = blocks[0], blocks[0]
    for block in blocks:
        if block != following:
            yield first * size, (following - first) * size
            first = following = block
        following += 1  # type: ignore[assignment]
    yield first * size, (following - first) * size
