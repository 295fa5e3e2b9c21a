"""Names of blocks without hashing: a trace states which blocks are equal, and names need to state nothing else."""

from collections.abc import Sequence
from typing import overload

from tandem.values.block_hash import HASH_BLOCK_TOKENS, HASH_BYTES, BlockHasher
from tandem.values.ids import BlockHash

_ROOT_BYTES = 10


def trace_name(block_id: int) -> BlockHash:
    """Return the name of a block that a trace refers to by number."""
    return BlockHash(b"t" + block_id.to_bytes(HASH_BYTES - 1, "big"))


def own_name(number: int, index: int = 0) -> BlockHash:
    """Return the name of a block that no other request shares: the `index`-th of request `number`."""
    return BlockHash(b"o" + number.to_bytes(_ROOT_BYTES - 1, "big") + index.to_bytes(HASH_BYTES - _ROOT_BYTES, "big"))


class TraceHasher(BlockHasher):
    """Replaces an engine's hasher: blocks without a name from the trace get a name of their request's own."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(b"")
        self.tokens_per_name = block_tokens

    def extend(self, root: BlockHash, chain: list[BlockHash], tokens: Sequence[int]) -> None:
        """Append names for all full blocks. `root` must be the request's `own_name`."""
        for index in range(len(chain), len(tokens) // self.tokens_per_name):
            chain.append(BlockHash(root[:_ROOT_BYTES] + index.to_bytes(HASH_BYTES - _ROOT_BYTES, "big")))


class SpacedNames(Sequence[BlockHash]):
    """Names of large blocks as a router expects them, one per hash block: each stands for all within its block."""

    __slots__ = ("_names", "_spacing")

    def __init__(self, names: Sequence[BlockHash], block_tokens: int) -> None:
        self._names = names
        self._spacing = block_tokens // HASH_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self._names) * self._spacing

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:
        spacing = self._spacing
        if isinstance(index, int):
            return self._names[(index if index >= 0 else len(self) + index) // spacing]
        if index.start == spacing - 1 and index.step == spacing and index.stop is None:
            return self._names
        return [self._names[i // spacing] for i in range(*index.indices(len(self)))]
