"""Copies cells between two mapped pools, in bursts small enough to be stopped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.runs import RunPair
from kv_transfer.memory import checksum, numpy_copy
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.departure import Departure
from kv_transfer.memory.mover import Mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.write_stop_lock import BURST_BYTES, WriteStopLock
from kv_transfer.transports.interface import WriteOrder
from tandem.errors import TransferError


class RegionCopier:
    """Copies from a source's region into a destination's, with compiled code if there is a `mover`, otherwise with
    numpy."""

    def __init__(self, source: KVRegion, target: KVRegion, pairing: Pairing, mover: Mover | None) -> None:
        if pairing.wire_dtype != pairing.destination.dtype:
            raise TransferError("the wire dtype must be the destination's when writing into its memory")
        self._source, self._target, self._to = source, target, target.array()
        self._departure = Departure(source, pairing)
        self._converts = self._departure.converts
        self._mover = mover
        self._last_target: tuple[PlacedCells, CellAddresses] | None = None

    def copy(
        self,
        order: WriteOrder,
        target: PlacedCells,
        gate: WriteStopLock,
        reading: Callable[[], AbstractContextManager[None]],
    ) -> tuple[int, int]:
        """Copy an order's cells to their positions in `target`. Returns (checksum, bytes). Raises TransferError.

        `reading` is entered instead of the gate while a device reads the sources.
        """
        if self._converts:
            return self._convert(order, target, gate, reading)
        if self._mover is None:
            return self._copy(order.source.run_pairs_to(target, order.cells), gate)
        source = CellAddresses(self._source, order.source, is_source=True)
        return self._mover.move(source, self._bytes_of(target), order.cells, gate)

    def _convert(
        self,
        order: WriteOrder,
        target: PlacedCells,
        gate: WriteStopLock,
        reading: Callable[[], AbstractContextManager[None]],
    ) -> tuple[int, int]:
        """Convert and copy layer by layer, the order on the wire, so that the lock is held for one layer at a time."""
        # Cells are looked up first, so that a refused order has written nothing.
        order.source.reads(order.cells)
        target.writes(order.cells)
        value = total = 0
        for layer in range(order.cells.first_layer, order.cells.first_layer + order.cells.num_layers):
            cells = replace(order.cells, first_layer=layer, num_layers=1)
            if self._departure.is_on_device:
                with reading():
                    payload = self._departure.convert(order.source, cells)
                with gate:
                    numpy_copy.scatter(target.writes(cells), payload, self._to)
            else:
                with gate:
                    payload = self._departure.convert(order.source, cells)
                    numpy_copy.scatter(target.writes(cells), payload, self._to)
            value = checksum.crc32(payload.data, value)
            total += payload.nbytes
        return value, total

    def _bytes_of(self, target: PlacedCells) -> CellAddresses:
        """Addresses of the target cells; cached, because the chunks of a hand-off follow one another."""
        if self._last_target is None or self._last_target[0] is not target:
            self._last_target = target, CellAddresses(self._target, target, is_source=False)
        return self._last_target[1]

    def _copy(self, copies: Iterable[RunPair], gate: WriteStopLock) -> tuple[int, int]:
        value = total = 0
        buffer, here_bytes, there_bytes = self._source.buffer, self._source.array(), self._to
        for burst in bursts(copies):
            with gate:
                for here, there, size in burst:
                    # numpy releases the GIL while it copies; slices of memoryviews would not.
                    np.copyto(there_bytes[there : there + size], here_bytes[here : here + size])
                    value = checksum.crc32(buffer[here : here + size], value)
                    total += size
        return value, total


def bursts(copies: Iterable[RunPair], burst_bytes: int = BURST_BYTES) -> Iterator[list[RunPair]]:
    """Split the copies into groups of at most `burst_bytes`."""
    burst: list[RunPair] = []
    room = burst_bytes
    for start, target, length in copies:
        here, there, left = start, target, length
        while left:
            size = min(left, room)
            burst.append((here, there, size))
            here, there, left, room = here + size, there + size, left - size, room - size
            if not room:
                yield burst
                burst, room = [], burst_bytes
    if burst:
        yield burst
