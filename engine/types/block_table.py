"""A sequence's ordered physical blocks."""

from array import array
from collections.abc import Iterable, Iterator

from tandem.values.ids import BlockId


class BlockTable:
    """A request's ordered physical blocks, as a C int array that a runner can view without copying."""

    __slots__ = ("_ids", "version")

    def __init__(self, ids: Iterable[BlockId] = ()) -> None:
        self._ids = array("i", ids)
        self.version = 0
        """Changes with every edit that is not an append, so that a mirror of the table copies only new blocks."""

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> BlockId:
        return BlockId(self._ids[index])

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(i) for i in self._ids)

    @property
    def ids(self) -> "array[int]":
        """The live array; read-only by convention, and never kept across a step."""
        return self._ids

    def append(self, block: BlockId) -> None:
        """Add the block for the next `block_size` tokens."""
        self._ids.append(block)

    def extend(self, blocks: Iterable[BlockId]) -> None:
        """Add the blocks for the next tokens, in order."""
        self._ids.extend(blocks)

    def replace(self, index: int, block: BlockId) -> None:
        """Point at an equal block instead: the one place where a table is not append-only (deduplication)."""
        self._ids[index] = block
        self.version += 1

    def clear(self) -> list[BlockId]:
        """Give up every block, in order."""
        ids = [BlockId(i) for i in self._ids]
        del self._ids[:]
        self.version += 1
        return ids
