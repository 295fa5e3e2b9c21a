"""Destination of one attempt's chunks: the pool itself, or memory beside it until they are verified and converted."""

import threading
from dataclasses import replace

import numpy as np

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.runs import Runs
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.checksum import checksum_of
from kv_transfer.memory.mover import load_mover
from kv_transfer.memory.region import Bytes, KVRegion
from tandem.errors import TransferError


class Landing:
    """Destinations of one reservation. Used by one transport, which locks where its threads meet."""

    def __init__(self, region: KVRegion, cells: PlacedCells, pairing: Pairing) -> None:
        self.cells = cells
        self.pairing = pairing
        self._region = region
        self._converter = pairing.at_arrival()
        self._converting = threading.Lock()
        self._device = region.device
        num_tokens = len(cells.at.blocks) * pairing.destination.block_size
        num_units = num_tokens // pairing.mapping.unit_tokens
        self._max_staged_bytes = num_units * pairing.destination.num_layers * pairing.unit_layer_bytes
        self._staged: dict[CellRange, Bytes] = {}
        self._checksums: dict[CellRange, int] = {}
        self._written: set[CellRange] = set()
        self._addresses: CellAddresses | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether a device performs `settle`; no lock that the event loop takes may be held meanwhile."""
        return self._device is not None

    def num_bytes(self, cells: CellRange) -> int:
        """Payload bytes of these cells in the wire dtype. Raises TransferError when they are not the model's."""
        return self.cells.payload(cells).num_bytes(self.pairing.wire_dtype)

    def spare(self, cells: CellRange) -> Bytes | None:
        """Allocate memory for `room` before its lock is taken: pinned memory may have to wait for the device.

        None where `room` needs none, or will refuse.
        """
        if self._device is None:
            return None
        try:
            self.cells.writes(cells)
            num_bytes = self.num_bytes(cells)
        except TransferError:
            return None
        return self._device.allocate(num_bytes) if num_bytes <= self._max_staged_bytes else None

    def room(self, cells: CellRange, spare: Bytes | None = None) -> list[memoryview]:
        """Memory for the payload of these cells, in the order of the wire; `spare` is what `spare()` returned.

        Raises TransferError for cells not reserved, and for cells already written and not found damaged.
        """
        runs = self.cells.writes(cells)
        if self._converter is None and self._device is None:
            self._begin(cells)
            return self._region.views(runs)
        others = sum(staged.nbytes for of, staged in list(self._staged.items()) if of != cells)
        num_bytes = self.num_bytes(cells)
        if others + num_bytes > self._max_staged_bytes:
            raise TransferError("more bytes are in flight than were reserved")
        self._begin(cells)
        staged = self._staged[cells] = self._allocate(num_bytes) if spare is None else spare
        return [staged.data]

    def addresses(self, cells: CellRange) -> CellAddresses | None:
        """Addresses at which compiled code puts the payload itself; None when it has to use `room`.

        Raises TransferError as `room` does.
        """
        if self._converter is not None or self._device is not None:
            return None
        self._begin(cells)
        return self._cell_addresses()

    def on_device(self, cells: CellRange) -> Runs:
        """Runs in the pool for payload that comes from device to device. Raises TransferError as `room` does."""
        if self._converter is not None or self._device is None:
            raise TransferError("this pool accepts no payload from a device")
        runs = self.cells.writes(cells)
        self._begin(cells)
        return runs

    def _begin(self, cells: CellRange) -> None:
        """Record a write of these cells; refuses a second one, because damage to verified cells would go unnoticed."""
        if cells in self._written:
            raise TransferError("these cells were written already")
        self._written.add(cells)
        self._checksums.pop(cells, None)

    def landed(self, cells: CellRange, checksum: int) -> None:
        """Record that the whole payload has landed, with the checksum computed on the way."""
        self._checksums[cells] = checksum

    def checksum(self, cells: CellRange) -> int | None:
        """Checksum of the payload in place, unless `landed` supplied it; None when a payload to be converted has not
        come."""
        known = self._checksums.pop(cells, None)
        if known is not None:
            return known
        staged = self._staged.get(cells)
        if staged is not None:
            return checksum_of([staged.data])
        if self._converter is not None:
            return None
        if self._device is not None:
            # A peer wrote it directly, so it never was in host memory, and its checksum is `sum32` (see torch_pool).
            return self._device.checksum(self.cells.writes(cells))
        return self._checksum_in_place(cells)

    def _checksum_in_place(self, cells: CellRange) -> int:
        mover = load_mover()
        if mover is None:
            return checksum_of(self._region.views(self.cells.writes(cells)))
        return mover.checksum(self._cell_addresses(), cells)

    def _cell_addresses(self) -> CellAddresses:
        if self._addresses is None:
            self._addresses = CellAddresses(self._region, self.cells, is_source=False)
        return self._addresses

    def num_settle_steps(self, cells: CellRange) -> int:
        """Number of steps, each of them short, that put verified cells into place; 0 when they landed there."""
        if cells not in self._staged and not self.cells.fan_out(cells).planes:
            return 0
        # A device copies all layers as fast as one.
        return cells.num_layers if self._device is None else 1

    def settle(self, cells: CellRange, step: int) -> None:
        """Perform one of these steps: convert staged payload, copy cells that several ranks hold.

        On a device, several threads may do so at the same time for different cells.
        """
        staged = self._staged.get(cells)
        if self._device is not None:
            if staged is not None:
                self._device.scatter(self.cells.writes(cells), self._converted(cells, staged))
            self._device.copy(self.cells.fan_out(cells))
            return
        layer = replace(cells, first_layer=cells.first_layer + step, num_layers=1)
        pool = self._region.array()
        if staged is not None:
            payload = self._converted(layer, staged.reshape(cells.num_layers, -1)[step])
            numpy_copy.scatter(self.cells.writes(layer), payload, pool)
        numpy_copy.copy(self.cells.fan_out(layer), pool, pool)

    def _converted(self, cells: CellRange, staged: Bytes) -> Bytes:
        if self._converter is None:
            return staged
        payload = self.cells.payload(cells)
        converted = self._allocate(payload.num_bytes(self._converter.destination))
        with self._converting:  # the converter has scratch memory, and chunks on a device are settled concurrently
            self._converter.convert(payload, staged, converted)
        return converted

    def _allocate(self, num_bytes: int) -> Bytes:
        return np.empty(num_bytes, np.uint8) if self._device is None else self._device.allocate(num_bytes)

    def judged(self, cells: CellRange, *, intact: bool) -> None:
        """Forget a payload that is in place or damaged; damaged cells may be written again."""
        self._staged.pop(cells, None)
        if not intact:
            self._written.discard(cells)
