"""`torch_dist`, receiving end: receives one write's payload from a communicator and puts it into place.

Payload in host memory is put into place under its grant's lock, so a revocation is proven at once even while a receive
is posted; a device does it within `WriteGrant.moving`. Payload whose grant has ended is received and discarded, so that
both sides stay in step.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from kv_transfer.layout.runs import Runs
from kv_transfer.memory.checksum import crc32
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.landing import Landing
from kv_transfer.transports.grants import WriteGrant
from kv_transfer.transports.torch_dist.communicator import SLOTS, Bytes, Communicator, CommunicatorBroken, Slots
from kv_transfer.transports.torch_dist.wire import BURST_BYTES, MAX_DIRECT_BYTES, MessageHeader
from tandem.errors import TransferError

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class PayloadIntake(Protocol):
    """Receives the payloads of one communicator; used by one thread."""

    def receive(self, header: MessageHeader, grant: WriteGrant | None) -> bool:
        """Receive a payload into its destinations, or discard it; returns whether it landed.

        Raises CommunicatorBroken when it was not received, and TransferError when the sender breaks the protocol.
        """


class HostIntake:
    """Receives payload in bursts of host memory, checksummed while they are in the cache."""

    def __init__(self, group: Communicator) -> None:
        self._slots = Slots(group)

    def receive(self, header: MessageHeader, grant: WriteGrant | None) -> bool:
        room = _room(header, grant)
        sizes = [min(BURST_BYTES, header.payload_bytes - at) for at in range(0, header.payload_bytes, BURST_BYTES)]
        checksum = 0
        for i, size in enumerate(sizes[:SLOTS]):
            self._slots.post(i, size)
        for i, size in enumerate(sizes):
            slot = i % SLOTS
            self._slots.wait(slot)
            burst = self._slots.bytes[slot][:size]
            checksum = crc32(burst.data, checksum)
            if grant is not None and room is not None and not _copy_burst(grant, room, burst):
                room = None
            if i + SLOTS < len(sizes):
                self._slots.post(slot, sizes[i + SLOTS])
        if grant is None or room is None:
            return False
        grant.landing.landed(header.cells, checksum)
        return True


class DeviceIntake:
    """Receives payload that stays on devices: into memory beside the pool, then put into place and summed there.

    That memory grows to the largest payload and is kept, so that allocations are rare.
    """

    def __init__(self, pool: DevicePool, group: Communicator) -> None:
        self._pool = pool
        self._group = group
        self._room: Any = None  # uint8 [the largest payload so far]

    def receive(self, header: MessageHeader, grant: WriteGrant | None) -> bool:
        if header.payload_bytes > MAX_DIRECT_BYTES:
            raise TransferError(f"{header.payload_bytes} bytes between devices, at most {MAX_DIRECT_BYTES} accepted")
        runs = _runs(header, grant)
        packed = self._room_for(header.payload_bytes)
        self._group.finish(self._group.start(packed))
        if grant is None or runs is None:
            return False
        with grant.moving() as begun:
            if not begun:
                return False
            try:
                checksum = self._pool.unpack_summed(runs, packed)
            except TransferError as error:
                log.warning("torch_dist: %s", error)
                return False
        grant.landing.landed(header.cells, checksum)
        return True

    def _room_for(self, num_bytes: int) -> Any:
        if self._room is None or self._room.numel() < num_bytes:
            try:
                self._room = self._pool.blank(num_bytes)
            except TransferError as error:
                # Without memory the payload cannot be discarded either.
                raise CommunicatorBroken(error.message) from None
        return self._room[:num_bytes]


def _room(header: MessageHeader, grant: WriteGrant | None) -> list[memoryview] | None:
    spare = None if grant is None else grant.landing.spare(header.cells)
    room = _find_landing(grant, lambda landing: landing.room(header.cells, spare))
    if room is not None:
        _check_size(header, sum(view.nbytes for view in room))
    return room


def _runs(header: MessageHeader, grant: WriteGrant | None) -> Runs | None:
    runs = _find_landing(grant, lambda landing: landing.on_device(header.cells))
    if runs is not None:
        _check_size(header, runs.num_bytes)
    return runs


def _find_landing(grant: WriteGrant | None, find: Callable[[Landing], _Found]) -> _Found | None:
    """The result of `find` for an open grant's landing; None when the grant has ended or lacks the cells."""
    if grant is None:
        return None
    with grant.lock:
        if grant.revoked:
            return None
        try:
            return find(grant.landing)
        except TransferError:
            return None


def _check_size(header: MessageHeader, num_bytes: int) -> None:
    if num_bytes != header.payload_bytes:
        raise TransferError(f"{header.payload_bytes} payload bytes do not fit their cells")


def _copy_burst(grant: WriteGrant, room: list[memoryview], burst: Bytes) -> bool:
    """Copy a burst to the front of the remaining views; False once the grant is revoked."""
    at = 0
    with grant.lock:
        if grant.revoked:
            return False
        while at < burst.nbytes:
            view = room[0]
            size = min(view.nbytes, burst.nbytes - at)
            np.copyto(np.frombuffer(view[:size], np.uint8), burst[at : at + size])
            at += size
            if size == view.nbytes:
                room.pop(0)
            else:
                room[0] = view[size:]
    return True
