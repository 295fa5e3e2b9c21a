"""Cuts a prompt's cells into chunks: each is moved by one write and covered by one checksum. Pure.

Cells leave as they are computed: all layers of earlier steps, and the finished layers of the current step. The wire is
thus busy while the next layers are computed, and when the last one is done only the last few layers of the last step
remain to be sent.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.lanes import Lane
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSize:
    """Dimensions of the cells of one hand-off that go through one lane, and their bytes."""

    num_layers: int
    num_heads: int
    unit_layer_bytes: int
    """Bytes of one unit in one layer on the wire, K and V of all heads."""
    first_layer: int = 0
    first_head: int = 0
    group: int = 0
    """Group of the layers, which has blocks of its own."""
    first_unit: int = 0
    """Units before it are not sent: their layers' windows are over."""
    model_layers: tuple[int, ...] = ()
    """The layers in the model's numbering, ascending, where that differs; empty: the same."""

    @classmethod
    def of_lane(
        cls,
        lane: Lane,
        layout: KVLayout,
        *,
        num_tokens: int,
        held_tokens: int,
        unit_tokens: int,
        unit_layer_bytes: int,
    ) -> "HandoffSize":
        """What one lane carries of a prompt of `num_tokens` tokens, the first `held_tokens` of which are there."""
        first_token = layout.first_window_block(num_tokens) * layout.block_size if lane.group else 0
        model_layers = layout.layer_order[lane.first_layer : lane.first_layer + lane.num_layers]
        return cls(
            num_layers=lane.num_layers,
            num_heads=lane.num_heads,
            unit_layer_bytes=unit_layer_bytes,
            first_layer=lane.first_layer,
            first_head=lane.first_head,
            group=lane.group,
            first_unit=max(0, first_token - held_tokens) // unit_tokens,
            model_layers=model_layers if layout.windowed_layers else (),
        )

    def num_computed(self, num_layers: int) -> int:
        """How many of the layers are among the model's first `num_layers`."""
        if self.model_layers:
            return bisect_left(self.model_layers, num_layers)
        return max(0, min(num_layers - self.first_layer, self.num_layers))


class ChunkPlanner:
    """Plans each cell once, in chunks of at most `chunk_bytes` (at least one unit of one layer)."""

    __slots__ = ("_chunk_bytes", "_done", "_early_end", "_early_layers", "_size")

    def __init__(self, size: HandoffSize, *, chunk_bytes: int) -> None:
        self._size = size
        self._chunk_bytes = chunk_bytes
        self._done = size.first_unit
        """End of the leading units that are planned in all layers, or not sent."""
        self._early_end = 0
        """End of the units that the current step computes; beyond `_done` only during a step."""
        self._early_layers = 0
        """Number of layers planned for those units."""

    def plan(self, num_ready: int, *, coming: int = 0, num_layers: int = 0) -> list[CellRange]:
        """Plan chunks for the cells that became ready since the last call.

        `num_ready`: units that are computed in all layers. `coming`: units that will be after the current step, which
        has computed them in the first `num_layers` layers of the model; 0 while there is no step.
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
        """Plan whole groups of layers only; the last layer is never planned before its step has ended."""
        group = self._layers_at_once(end - self._done)
        new_layers = min(self._size.num_computed(num_layers), self._size.num_layers - 1) - self._early_layers
        planned = self._early_layers + max(0, new_layers) // group * group
        chunks = self._by_layers(end, self._early_layers, planned)
        if chunks:
            self._early_end, self._early_layers = end, planned
        return chunks

    def _by_layers(self, end: int, first_layer: int, end_layer: int) -> list[CellRange]:
        """Chunks of all units that a step computes, a few layers at a time."""
        layers = self._layers_at_once(end - self._done)
        units = self._units_at_once(layers)
        return [
            self._cells(layer, min(layers, end_layer - layer), unit, min(units, end - unit))
            for layer in range(first_layer, end_layer, layers)
            for unit in range(self._done, end, units)
        ]

    def _by_units(self, end: int) -> list[CellRange]:
        """Chunks of units that are ready in all layers, a few units at a time, so that whole blocks have landed after a
        failure."""
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
            first_layer=self._size.first_layer + first_layer,
            num_layers=num_layers,
            first_unit=first_unit,
            num_units=num_units,
            first_head=self._size.first_head,
            num_heads=self._size.num_heads,
        )
