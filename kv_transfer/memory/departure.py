"""Reads the cells that a sender sends: in place, or as a converted copy."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.mapping import Payload
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.runs import Runs
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.region import Bytes, KVRegion

MAX_CONVERTED_BYTES = 1 << 20
"""Maximum size of one converted part in the wire dtype; bounds the memory, and the time that sources are held."""


class Departure:
    """Reads and converts the cells of one connection; used by one thread."""

    def __init__(self, region: KVRegion, pairing: Pairing) -> None:
        self._region = region
        self._pairing = pairing
        self._converter = pairing.at_departure()

    @property
    def converts(self) -> bool:
        """Whether the payload must be copied before it leaves: it is converted, or the pool is not in host memory."""
        return self._converter is not None or self._region.device is not None

    @property
    def is_on_device(self) -> bool:
        """Whether a device reads the sources; no lock that the event loop takes may be held meanwhile."""
        return self._region.device is not None

    def views(self, source: PlacedCells, cells: CellRange) -> list[memoryview]:
        """Views of the cells' bytes in the order of the wire. Raises TransferError for cells not held."""
        return self._region.views(source.reads(cells))

    def convert(self, source: PlacedCells, cells: CellRange) -> Bytes:
        """A copy of the cells in the wire dtype; the pool is not read after this returns."""
        payload = source.payload(cells)
        gathered = self._gathered(source.reads(cells), payload.num_bytes(self._pairing.source.dtype))
        if self._converter is None:
            return gathered
        converted = np.empty(payload.num_bytes(self._pairing.wire_dtype), np.uint8)
        self._converter.convert(payload, gathered, converted)
        return converted

    def _gathered(self, runs: Runs, num_bytes: int) -> Bytes:
        device = self._region.device
        if device is not None:
            gathered = device.allocate(num_bytes)
            device.gather(runs, gathered)
            return gathered
        gathered = np.empty(num_bytes, np.uint8)
        numpy_copy.gather(runs, self._region.array(), gathered)
        return gathered


def split_for_conversion(cells: CellRange, payload: Payload, num_bytes: int) -> Iterator[CellRange]:
    """Split `cells` so that the parts' payloads, concatenated, are the payload of `cells` (see the order in
    mapping.py).

    Parts have at most MAX_CONVERTED_BYTES, or the least that can be converted: one unit of one range of heads in one
    layer.
    """
    layer_bytes = num_bytes // cells.num_layers
    end_layer, end_unit = cells.first_layer + cells.num_layers, cells.first_unit + cells.num_units
    if layer_bytes <= MAX_CONVERTED_BYTES:
        step = MAX_CONVERTED_BYTES // layer_bytes
        for layer in range(cells.first_layer, end_layer, step):
            yield replace(cells, first_layer=layer, num_layers=min(step, end_layer - layer))
        return
    unit_head_bytes = layer_bytes // (cells.num_units * cells.num_heads)
    for layer in range(cells.first_layer, end_layer):
        for first_head, num_heads in payload.head_ranges:
            step = max(1, MAX_CONVERTED_BYTES // (unit_head_bytes * num_heads))
            for unit in range(cells.first_unit, end_unit, step):
                yield CellRange(
                    first_layer=layer,
                    num_layers=1,
                    first_unit=unit,
                    num_units=min(step, end_unit - unit),
                    first_head=first_head,
                    num_heads=num_heads,
                )
