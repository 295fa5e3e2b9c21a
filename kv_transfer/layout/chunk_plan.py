"""How a prompt's cells are cut into chunks: what one write moves and one checksum covers. Pure.

Cells leave as they come into being: all layers of what earlier steps computed, and of the step under way those layers
that are done. So the wire is busy while the next layers are computed, and what is still to be sent when the last
one is done is the last few layers of the last step.
"""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSize:
    """Layers and heads of the cells of one hand-off, and their bytes."""

    num_layers: int
    num_heads: int
    unit_layer_bytes: int
    """Bytes of one unit in one layer, all heads of K and V, as they travel."""


class ChunkPlanner:
    """Plans each cell once, in chunks of at most `chunk_bytes` (at least one unit of one layer)."""

    __slots__ = ("_chunk_bytes", "_done", "_early_end", "_early_layers", "_size")

    def __init__(self, size: HandoffSize, *, chunk_bytes: int) -> None:
        self._size = size
        self._chunk_bytes = chunk_bytes
        self._done = 0
        """Units planned in all layers."""
        self._early_end = 0
        """Units up to here are being computed by the step under way; beyond `_done` only within a step."""
        self._early_layers = 0
        """Of those, layers that are planned."""

    def plan(self, num_ready: int, *, coming: int = 0, num_layers: int = 0) -> list[CellRange]:
        """Chunks for what became ready since the last call.

        `num_ready`: units that are computed in all layers. `coming`: units that will be after the step under way,
        which has computed them in the first `num_layers` layers; 0 while no step is under way.
        """
        chunks: list[CellRange] = []
        if self._early_layers and num_ready >= self._early_end:
            chunks += self._by_layers(self._early_end, self._early_layers, self._size.num_layers)
            self._done, self._early_layers = self._early_end, 0
        if not self._early_layers and num_ready > self._done:
            chunks += self._by_units(num_ready)
            self._done = num_ready
        if coming > self._done and (not self._early_layers or coming == self._early_end):
            chunks += self._plan_early_layers(coming, num_layers)
        return chunks

    def _plan_early_layers(self, end: int, num_layers: int) -> list[CellRange]:
        """Whole groups of layers only; the last layer is never planned before its step is over."""
        group = self._layers_at_once(end - self._done)
        new_layers = min(num_layers, self._size.num_layers - 1) - self._early_layers
        planned = self._early_layers + max(0, new_layers) // group * group
        chunks = self._by_layers(end, self._early_layers, planned)
        if chunks:
            self._early_end, self._early_layers = end, planned
        return chunks

    def _by_layers(self, end: int, first_layer: int, end_layer: int) -> list[CellRange]:
        """What a step computes: all its units, a few layers at a time."""
        layers = self._layers_at_once(end - self._done)
        units = self._units_at_once(layers)
        return [
            self._cells(layer, min(layers, end_layer - layer), unit, min(units, end - unit))
            for layer in range(first_layer, end_layer, layers)
            for unit in range(self._done, end, units)
        ]

    def _by_units(self, end: int) -> list[CellRange]:
        """What is there in all layers: a few units at a time, so that whole blocks have landed if it fails midway."""
        all_layers = self._size.num_layers
        units = self._units_at_once(all_layers)
        layers = self._layers_at_once(units)
        return [
            self._cells(layer, min(layers, all_layers - layer), unit, min(units, end - unit))
            for unit in range(self._done, end, units)
            for layer in range(0, all_layers, layers)
        ]

    def _layers_at_once(self, num_units: int) -> int:
        return max(1, min(self._size.num_layers, self._chunk_bytes // (num_units * self._size.unit_layer_bytes)))

    def _units_at_once(self, num_layers: int) -> int:
        return max(1, self._chunk_bytes // (num_layers * self._size.unit_layer_bytes))

    def _cells(self, first_layer: int, num_layers: int, first_unit: int, num_units: int) -> CellRange:
        return CellRange(
            first_layer=first_layer,
            num_layers=num_layers,
            first_unit=first_unit,
            num_units=num_units,
            first_head=0,
            num_heads=self._size.num_heads,
        )
