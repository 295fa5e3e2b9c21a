"""Tracks which cells of one lane of a reservation are announced and which have landed.

A unit is a bit mask over (layer, head), so that chunks may cut the reservation in any direction: by units as
prefill chunks finish, by layers as a forward pass goes on, by heads when tensor-parallel sizes differ.
"""

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.lanes import Lane


class Coverage:
    """Announced and landed cells of one lane, as masks; no bytes are touched."""

    __slots__ = ("_claimed", "_first_unit", "_full", "_landed", "_lane", "num_units")

    def __init__(self, *, num_units: int, lane: Lane, first_unit: int = 0) -> None:
        """`first_unit`: units before it are not sent and count as landed."""
        self.num_units = num_units
        self._first_unit = first_unit = min(first_unit, num_units)
        self._lane = lane
        self._full = (1 << (lane.num_layers * lane.num_heads)) - 1
        self._claimed = [0] * num_units
        self._landed = [self._full] * first_unit + [0] * (num_units - first_unit)

    @property
    def num_cells(self) -> int:
        """Number of cells, which bounds the number of chunks."""
        return (self.num_units - self._first_unit) * self._lane.num_layers * self._lane.num_heads

    @property
    def complete(self) -> bool:
        """Whether every cell has landed."""
        return all(mask == self._full for mask in self._landed)

    def contains(self, cells: CellRange) -> bool:
        """Whether `cells` is not empty and lies within the lane and the part of the reservation that is sent."""
        return self._lane.contains(cells) and self._first_unit <= cells.first_unit <= self.num_units - cells.num_units

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
        lane = self._lane
        heads = ((1 << cells.num_heads) - 1) << (cells.first_head - lane.first_head)
        mask = 0
        first_layer = cells.first_layer - lane.first_layer
        for layer in range(first_layer, first_layer + cells.num_layers):
            mask |= heads << (layer * lane.num_heads)
        return mask


def _units(cells: CellRange) -> range:
    return range(cells.first_unit, cells.first_unit + cells.num_units)
