"""Where one attempt's chunks land: in the pool itself, or beside it until they are verified and converted."""

import numpy as np

from kv_transfer import placing
from kv_transfer.checksum import checksum_of
from kv_transfer.messages import CellRange
from kv_transfer.mover import PlacedBytes, load_mover
from kv_transfer.pairing import Pairing
from kv_transfer.placed import PlacedCells
from kv_transfer.region import Bytes, KVRegion
from tandem.errors import TransferError


class Landing:
    """One reservation's destinations. Used by one transport, under its own lock where threads meet."""

    def __init__(self, region: KVRegion, cells: PlacedCells, pairing: Pairing) -> None:
        self.cells = cells
        self.pairing = pairing
        self._region = region
        self._converter = pairing.at_arrival()
        num_tokens = len(cells.at.blocks) * pairing.destination.block_size
        num_units = num_tokens // pairing.mapping.unit
        self._max_staged_bytes = num_units * pairing.destination.num_layers * pairing.unit_layer_bytes
        self._staged: dict[CellRange, Bytes] = {}
        self._checksums: dict[CellRange, int] = {}
        self._bytes: PlacedBytes | None = None

    def num_bytes(self, cells: CellRange) -> int:
        """Payload of these cells. Raises TransferError when they are not the model's."""
        return self.cells.payload(cells).num_bytes(self.pairing.wire_dtype)

    def room(self, cells: CellRange) -> list[memoryview]:
        """Where their payload goes, in the order of the wire. Raises TransferError for cells not reserved."""
        runs = self.cells.writes(cells)
        self._checksums.pop(cells, None)
        if self._converter is None:
            return self._region.views(runs)
        others = sum(staged.nbytes for of, staged in self._staged.items() if of != cells)
        num_bytes = self.num_bytes(cells)
        if others + num_bytes > self._max_staged_bytes:
            raise TransferError("more is on the way than was reserved")
        staged = self._staged[cells] = np.empty(num_bytes, np.uint8)
        return [staged.data]

    def landed(self, cells: CellRange, checksum: int) -> None:
        """All of it is there; its checksum was computed on the way."""
        self._checksums[cells] = checksum

    def checksum(self, cells: CellRange) -> int | None:
        """Of what lies there now, as far as anything does."""
        known = self._checksums.pop(cells, None)
        if known is not None:
            return known
        if self._converter is None:
            return self._checksum_in_place(cells)
        staged = self._staged.get(cells)
        return None if staged is None else checksum_of([staged.data])

    def _checksum_in_place(self, cells: CellRange) -> int:
        mover = load_mover()
        if mover is None:
            return checksum_of(self._region.views(self.cells.writes(cells)))
        if self._bytes is None:
            self._bytes = PlacedBytes(self._region, self.cells, is_source=False)
        return mover.checksum(self._bytes, cells)

    def settle(self, cells: CellRange) -> None:
        """Put verified cells into place: convert what is staged, copy what several ranks hold."""
        pool = self._region.array()
        if self._converter is not None:
            payload = self.cells.payload(cells)
            converted = np.empty(payload.num_bytes(self._converter.destination), np.uint8)
            self._converter.convert(payload, self._staged.pop(cells), converted)
            placing.scatter(self.cells.writes(cells), converted, pool)
        placing.copy(self.cells.fan_out(cells), pool, pool)

    def discard(self, cells: CellRange) -> None:
        """Forget a damaged payload."""
        self._staged.pop(cells, None)
