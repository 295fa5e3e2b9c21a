"""Which cells of a reservation are announced and which have landed.

A block is a bit mask over (layer, head), so that chunks may cut the reservation in any direction: by blocks as
prefill chunks finish, by layers as a forward pass goes on, by heads when tensor-parallel sizes differ.
"""

from kv_transfer.messages import CellRange


class Coverage:
    """Bookkeeping of one reservation; knows shapes, not bytes."""

    __slots__ = ("_claimed", "_first_head", "_full", "_landed", "_num_heads", "_num_layers", "num_blocks")

    def __init__(self, *, num_blocks: int, num_layers: int, first_head: int, num_heads: int) -> None:
        self.num_blocks = num_blocks
        self._num_layers = num_layers
        self._first_head = first_head
        self._num_heads = num_heads
        self._full = (1 << (num_layers * num_heads)) - 1
        self._claimed = [0] * num_blocks
        self._landed = [0] * num_blocks

    @property
    def num_cells(self) -> int:
        """Upper bound of the number of chunks."""
        return self.num_blocks * self._num_layers * self._num_heads

    @property
    def complete(self) -> bool:
        """Whether every cell has landed."""
        return all(mask == self._full for mask in self._landed)

    def contains(self, cells: CellRange) -> bool:
        """Whether `cells` is a non-empty box inside the reservation."""
        head = cells.first_head - self._first_head
        return (
            cells.num_layers > 0
            and cells.num_blocks > 0
            and cells.num_heads > 0
            and 0 <= cells.first_layer <= self._num_layers - cells.num_layers
            and 0 <= cells.first_block <= self.num_blocks - cells.num_blocks
            and 0 <= head <= self._num_heads - cells.num_heads
        )

    def claim(self, cells: CellRange) -> None:
        """Note that a chunk announces these cells."""
        mask = self._mask(cells)
        for block in _blocks(cells):
            self._claimed[block] |= mask

    def claimed(self, cells: CellRange) -> bool:
        """Whether some of these cells are announced already."""
        mask = self._mask(cells)
        return any(self._claimed[block] & mask for block in _blocks(cells))

    def land(self, cells: CellRange) -> None:
        """Note that these cells are here and verified."""
        mask = self._mask(cells)
        for block in _blocks(cells):
            self._landed[block] |= mask

    def num_landed_leading_blocks(self) -> int:
        """Blocks from the start of which every cell has landed."""
        for block, mask in enumerate(self._landed):
            if mask != self._full:
                return block
        return self.num_blocks

    def _mask(self, cells: CellRange) -> int:
        heads = ((1 << cells.num_heads) - 1) << (cells.first_head - self._first_head)
        mask = 0
        for layer in range(cells.first_layer, cells.first_layer + cells.num_layers):
            mask |= heads << (layer * self._num_heads)
        return mask


def _blocks(cells: CellRange) -> range:
    return range(cells.first_block, cells.first_block + cells.num_blocks)
