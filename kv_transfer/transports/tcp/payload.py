"""The payload of one write, in parts: views of the pool itself, or cells converted a little at a time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.mapping import Payload
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.departure import Departure, split_for_conversion
from kv_transfer.memory.mover import Mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.socket_stream import StreamStep
from kv_transfer.memory.write_stop_lock import BurstLock
from kv_transfer.transports.tcp.bursts import StreamPart, ViewsPart
from kv_transfer.transports.tcp.channel import ByteChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    num_bytes: int
    parcels: Iterator[StreamPart]
    """Parts in order. A part reads the pool when it is taken from here or, if it is a view of the pool, when it is
    sent."""


class PayloadMaker:
    """Makes payloads of cells, to be sent through `channel` under `lock`. One thread at a time."""

    def __init__(
        self, region: KVRegion, pairing: Pairing, channel: ByteChannel, lock: BurstLock, mover: Mover | None
    ) -> None:
        self._region = region
        self._mover = mover
        self._departure = Departure(region, pairing)
        self._wire_dtype = pairing.wire_dtype
        self._channel = channel
        self._lock = lock

    @property
    def are_on_device(self) -> bool:
        """Whether a device reads the sources; see Departure."""
        return self._departure.is_on_device

    def make(
        self, source: PlacedCells, cells: CellRange, reading: Callable[[], AbstractContextManager[None]]
    ) -> Outgoing:
        """Make the payload of `cells`; `reading` is entered around each conversion. Raises TransferError for cells not
        held."""
        if not self._departure.converts:
            parcel = self._as_they_lie(source, cells)
            return Outgoing(num_bytes=parcel.num_bytes, parcels=iter((parcel,)))
        source.reads(cells)  # missing cells are refused here, before anything is sent
        payload = source.payload(cells)
        return Outgoing(
            num_bytes=payload.num_bytes(self._wire_dtype), parcels=self._converted(source, cells, payload, reading)
        )

    def _as_they_lie(self, source: PlacedCells, cells: CellRange) -> StreamPart:
        descriptor = self._channel.descriptor
        if self._mover is None or descriptor is None:
            return self._parcel(self._departure.views(source, cells))
        addresses = CellAddresses(self._region, source, is_source=True)
        return self._mover.streams.open(addresses, cells, descriptor, self._lock, is_sending=True)

    def _parcel(self, views: list[memoryview], value: int = 0) -> ViewsPart:
        channel = self._channel
        return ViewsPart(views, channel.send, burst_bytes=channel.burst_bytes, at_zero=StreamStep.BLOCKED, value=value)

    def _converted(
        self,
        source: PlacedCells,
        cells: CellRange,
        payload: Payload,
        reading: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[StreamPart]:
        value = 0
        for part in split_for_conversion(cells, payload, payload.num_bytes(self._wire_dtype)):
            with reading():
                converted = self._departure.convert(source, part)
            parcel = self._parcel([converted.data], value)
            yield parcel
            value = parcel.checksum
