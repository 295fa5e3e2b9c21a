"""`torch_dist`, sending end: packs one write's payload and sends it through a communicator.

Sources in host memory are read only under the queue's lock, so a cancel is proven at once; a device reads them before
anything is announced, without the lock, and a cancel takes effect when it is done. An announced payload is always sent,
whatever it holds by then, so that both sides stay in step.
"""

from typing import Any, Protocol

import numpy as np

from kv_transfer.memory.checksum import crc32
from kv_transfer.memory.departure import Departure
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.write_stop_lock import BurstLock
from kv_transfer.transports.torch_dist.communicator import SLOTS, Bytes, Communicator, Slots
from kv_transfer.transports.torch_dist.wire import BURST_BYTES, MAX_DIRECT_BYTES, MAX_PAYLOAD_BYTES
from kv_transfer.transports.write_queue import WriteJob, WriteQueue
from tandem.errors import TransferError


class PackedWrite(Protocol):
    num_bytes: int
    checksum: int
    """Checksum of the payload; complete before its last byte is sent, since the answer may come right after it."""

    def send(self) -> None:
        """Send all of it. Raises CommunicatorBroken."""


class Packer(Protocol):
    """Packs the payloads of one communicator; used by one thread."""

    def pack(self, job: WriteJob, queue: WriteQueue) -> PackedWrite:
        """Pack the next payload. Raises TransferError."""


class HostPacker:
    """Packs payload that is sent in bursts of host memory, gathered one at a time."""

    def __init__(self, departure: Departure, group: Communicator) -> None:
        self._departure = departure
        self._slots = Slots(group)

    def pack(self, job: WriteJob, queue: WriteQueue) -> "PackedHostWrite":
        order, departure = job.order, self._departure
        if not departure.converts:
            return PackedHostWrite(departure.views(order.source, order.cells), self._slots, job, queue.lock)
        with queue.reading(job) if departure.is_on_device else queue.lock:
            job.check()
            views = [departure.convert(order.source, order.cells).data]
        return PackedHostWrite(views, self._slots, job, queue.lock)


class PackedHostWrite:
    def __init__(self, views: list[memoryview], slots: Slots, job: WriteJob, lock: BurstLock) -> None:
        self.num_bytes = _bounded(sum(view.nbytes for view in views), MAX_PAYLOAD_BYTES)
        self.checksum = 0
        self._views = views
        self._slots = slots
        self._job = job
        self._lock = lock

    def send(self) -> None:
        """Send the payload; its checksum covers the gathered bytes, computed while they are in the cache."""
        for i, at in enumerate(range(0, self.num_bytes, BURST_BYTES)):
            slot, size = i % SLOTS, min(BURST_BYTES, self.num_bytes - at)
            self._slots.wait(slot)
            burst = self._slots.bytes[slot][:size]
            with self._lock:
                if not self._job.stopped:
                    _gather(self._views, burst)
            self.checksum = crc32(burst.data, self.checksum)
            self._slots.post(slot, size)
        for slot in range(SLOTS):
            self._slots.wait(slot)


class DevicePacker:
    """Packs payload that stays on devices: into one tensor beside the pool, where it is also summed."""

    def __init__(self, pool: DevicePool, group: Communicator) -> None:
        self._pool = pool
        self._group = group

    def pack(self, job: WriteJob, queue: WriteQueue) -> "PackedDeviceWrite":
        reads = job.order.source.reads(job.order.cells)
        _bounded(reads.num_bytes, MAX_DIRECT_BYTES)
        with queue.reading(job):
            packed, checksum = self._pool.pack_summed(reads)
        return PackedDeviceWrite(packed, checksum, reads.num_bytes, self._group)


class PackedDeviceWrite:
    def __init__(self, packed: Any, checksum: int, num_bytes: int, group: Communicator) -> None:
        self.num_bytes = num_bytes
        self.checksum = checksum
        self._packed = packed
        self._group = group

    def send(self) -> None:
        packed, self._packed = self._packed, None
        self._group.finish(self._group.start(packed))


def _bounded(num_bytes: int, limit: int) -> int:
    if num_bytes > limit:
        raise TransferError(f"a payload of {num_bytes} bytes, at most {limit} can be sent")
    return num_bytes


def _gather(views: list[memoryview], burst: Bytes) -> None:
    """Fill `burst` from the front of the views, and remove the copied bytes from them."""
    at = 0
    while at < burst.nbytes:
        view = views[0]
        size = min(view.nbytes, burst.nbytes - at)
        np.copyto(burst[at : at + size], np.frombuffer(view[:size], np.uint8))
        at += size
        if size == view.nbytes:
            views.pop(0)
        else:
            views[0] = view[size:]
