"""Tracks which cells of a reservation are announced and which have landed.

A unit is a bit mask over (layer, head), so that chunks may cut the reservation in any direction: by units as
prefill chunks finish, by layers as a forward pass goes on, by heads when tensor-parallel sizes differ.
"""

from kv_transfer.layout.cell_range import CellRange


class Coverage:
    """Announced and landed cells of one reservation, as masks; no bytes are touched."""

    __slots__ = ("_claimed", "_full", "_landed", "_num_heads", "_num_layers", "num_units")

    def __init__(self, *, num_units: int, num_layers: int, num_heads: int) -> None:
        self.num_units = num_units
        self._num_layers = num_layers
        self._num_heads = num_heads
        self._full = (1 << (num_layers * num_heads)) - 1
        self._claimed = [0] * num_units
        self._landed = [0] * num_units

    @property
    def num_cells(self) -> int:
        """Number of cells, which bounds the number of chunks."""
        return self.num_units * self._num_layers * self._num_heads

    @property
    def complete(self) -> bool:
        """Whether every cell has landed."""
        return all(mask == self._full for mask in self._landed)

    def contains(self, cells: CellRange) -> bool:
        """Whether `cells` is not empty and lies within the reservation."""
        return (
            cells.num_layers > 0
            and cells.num_units > 0
            and cells.num_heads > 0
            and 0 <= cells.first_layer <= self._num_layers - cells.num_layers
            and 0 <= cells.first_unit <= self.num_units - cells.num_units
            and 0 <= cells.first_head <= self._num_heads - cells.num_heads
        )

    def claim(self, cells: CellRange) -> None:
        """Record that a chunk announces these cells."""
        mask = self._mask(cells)
        for unit in _units(cells):
            self._claimed[unit] |= mask

    def claimed(self, cells: CellRange) -> bool:
        """Whether some of these cells are announced already."""
        mask = self._mask(cells)
        return any(self._claimed[unit] & mask for unit in _units(cells))

    def land(self, cells: CellRange) -> None:
        """Record that these cells have landed and are verified."""
        mask = self._mask(cells)
        for unit in _units(cells):
            self._landed[unit] |= mask

    def num_landed_leading_units(self) -> int:
        """Number of leading units of which every cell has landed."""
        for unit, mask in enumerate(self._landed):
            if mask != self._full:
                return unit
        return self.num_units

    def _mask(self, cells: CellRange) -> int:
        heads = ((1 << cells.num_heads) - 1) << cells.first_head
        mask = 0
        for layer in range(cells.first_layer, cells.first_layer + cells.num_layers):
            mask |= heads << (layer * self._num_heads)
        return mask


def _units(cells: CellRange) -> range:
    return range(cells.first_unit, cells.first_unit + cells.num_units)
