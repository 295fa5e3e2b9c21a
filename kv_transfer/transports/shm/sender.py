"""`shm`, sending end: maps the receiver's pool and copies into it directly."""

import os
import select
import socket

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.memory.mover import Mover, load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import map_shared
from kv_transfer.memory.write_stop_lock import WriteStopLock
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.writer import ClaimingWriter
from kv_transfer.transports.region_copy import RegionCopier
from kv_transfer.transports.same_host import host_id
from kv_transfer.transports.same_host_sockets import dial_on_this_host
from kv_transfer.transports.shm import wire as shm_wire
from kv_transfer.transports.shm.receiver import NAME
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.values.ids import BlockId


class ShmWriter(ClaimingWriter):
    """PeerWriter of the `shm` transport."""

    def __init__(
        self, source: KVRegion, sock: socket.socket, target: KVRegion, pairing: Pairing, mover: Mover | None
    ) -> None:
        self._pairing = pairing
        self._pool_blocks = target.num_blocks
        self._copier: RegionCopier | None = RegionCopier(source, target, pairing, mover)
        self._last: tuple[bytes, bytes, PlacedCells] | None = None
        self._end = select.poll()
        self._end.register(sock, select.POLLRDHUP)
        super().__init__(sock, NAME)

    def close(self) -> None:
        super().close()
        # Unmap the pool of a peer that has ended now, not at the next garbage collection.
        self._copier = None

    def _perform(self, job: WriteJob) -> None:
        copier = self._copier
        if copier is None:
            raise TransferError("connection closed")
        token, target = self._unpacked(job.order)
        self._claim(job, token)
        gate = WriteStopLock(lambda: self._check_all(job, token), self._queue.lock)
        job.succeed(*copier.copy(job.order, target, gate, lambda: self._queue.reading(job)))

    def _check_all(self, job: WriteJob, token: bytes) -> None:
        """Check the socket too: the memory outlives its owner, and the thread that reads the socket may be late."""
        self._check(job, token)
        if self._end.poll(0):
            raise TransferError("the receiver has disconnected")

    def _unpacked(self, order: WriteOrder) -> tuple[bytes, PlacedCells]:
        """Token and target cells of an order's grant; cached, because the chunks of a hand-off follow one another."""
        if self._last is None or self._last[0] != order.grant:
            token, slots = one_sided_wire.unpack_grant(order.grant)
            blocks = tuple(BlockId(slot) for slot in slots)
            target = self._pairing.at_destination(order.source.at.held_tokens, blocks, self._pool_blocks)
            self._last = order.grant, token, target
        return self._last[1:]


class ShmSender:
    """KVSender of the `shm` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._mover = load_mover()

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == NAME and offer.host_id == host_id()

    def connect(self, offer: TransportOffer, pairing: Pairing) -> ShmWriter:
        sock = dial_on_this_host(offer.advert, NAME)
        try:
            num_blocks, fd = shm_wire.receive_region(sock)
            try:
                buffer = map_shared(fd, num_blocks * pairing.destination.region_block_bytes)
            finally:
                os.close(fd)
            target = KVRegion.from_buffer(buffer, pairing.destination)
            sock.settimeout(None)
            return ShmWriter(self._region, sock, target, pairing, self._mover)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"shm: {error}") from None
        except TransferError:
            sock.close()
            raise
