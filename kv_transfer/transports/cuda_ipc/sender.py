"""`cuda_ipc`, sending end: copies from this GPU's pool into the receiver's, on a CUDA stream of its own.

A chunk is copied into the peer's pool and summed by this side's device; it counts as written once the stream has
finished. No lock that a cancel or the next order needs is held meanwhile: the claim is marked busy, a cancelled write
ends with its chunk, and QUIET is sent then.
"""

import functools
import socket
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.runs import Runs
from kv_transfer.memory.device_pool import DevicePool, SendLane, SendUnderWay
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.cuda_ipc.device_sharing import DeviceSharing
from kv_transfer.transports.cuda_ipc.receiver import NAME, unpack_loan
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.writer import ClaimingWriter, GrantClaim
from kv_transfer.transports.same_host import host_id
from kv_transfer.transports.same_host_sockets import dial_on_this_host
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.values.ids import BlockId

MAX_FLYING = 2
"""Maximum number of chunks that the device copies while another is started."""
MAX_KNOWN_GRANTS = 32


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A job whose bytes the device may still be copying."""

    job: WriteJob
    token: bytes
    claim: GrantClaim
    num_bytes: int
    send: SendUnderWay


class CudaIpcWriter(ClaimingWriter):
    """PeerWriter of the `cuda_ipc` transport; `target` is the receiver's memory, opened in this process.

    The next chunks are started while the device copies one, up to MAX_FLYING.
    """

    def __init__(self, source: DevicePool, sock: socket.socket, target: Any, pairing: Pairing) -> None:
        pool = TorchPool(target, pairing.destination)
        self._num_blocks = pool.num_blocks
        self._lane: SendLane | None = source.lane_to(pool)
        self._pairing = pairing
        self._flying: deque[_Flight] = deque()
        self._moving = threading.Lock()
        """Held while anything flies."""
        # A hand-off has one grant for all of its chunks.
        self._destination = functools.lru_cache(MAX_KNOWN_GRANTS)(self._unpack_grant)
        super().__init__(sock, NAME)

    def close(self) -> None:
        super().close()
        # Memory of a GPU that the peer has left is freed only when no process holds it open any more.
        self._lane = None

    def _perform(self, job: WriteJob) -> None:
        lane, order = self._lane, job.order
        if lane is None:
            raise TransferError("connection closed")
        token, target = self._destination(order.grant, order.source.at.held_tokens)
        reads, writes = order.source.reads(order.cells), target.writes(order.cells)
        if token not in self._claims:
            self._idle()  # those that fly do not wait for the receiver's answer
        self._claim(job, token)
        self._start(lane, job, token, reads, writes)
        while self._flying and (len(self._flying) > MAX_FLYING or self._flying[0].send.done()):
            self._land()

    def _start(self, lane: SendLane, job: WriteJob, token: bytes, reads: Runs, writes: Runs) -> None:
        if not self._flying:
            self._moving.acquire()
        try:
            claim = self._enter(job, token)
            try:
                send = lane.start(reads, writes)
            except BaseException:
                self._leave(job, token, claim)
                raise
            self._flying.append(_Flight(job=job, token=token, claim=claim, num_bytes=reads.num_bytes, send=send))
        finally:
            if not self._flying:
                self._moving.release()

    def _land(self) -> None:
        """Wait for the oldest that flies."""
        flight = self._flying.popleft()
        job = flight.job
        try:
            checksum = flight.send.result()
        finally:
            self._leave(job, flight.token, flight.claim)
            if not self._flying:
                self._moving.release()
        if job.stopped:
            job.fail("write cancelled")
        else:
            job.succeed(checksum, flight.num_bytes)

    def _idle(self) -> None:
        try:
            while self._flying:
                self._land()
        finally:
            if self._flying:  # after an error the others land all the same
                self._idle()

    def _unpack_grant(self, grant: bytes, held_tokens: int) -> tuple[bytes, PlacedCells]:
        """The token of a grant, and the cells that it opens."""
        token, slots = one_sided_wire.unpack_grant(grant)
        return token, self._pairing.at_destination(held_tokens, tuple(map(BlockId, slots)), self._num_blocks)

    def _stopped(self) -> None:
        # Every job is stopped by now; once this lock is free, those that were flying have ended.
        self._moving.acquire()
        self._moving.release()


class CudaIpcSender:
    """KVSender of the `cuda_ipc` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion, sharing: DeviceSharing) -> None:
        self._region = region
        self._sharing = sharing

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == NAME and offer.host_id == host_id()

    def connect(self, offer: TransportOffer, pairing: Pairing) -> CudaIpcWriter:
        device = self._region.device
        if device is None or pairing.at_departure() is not None or pairing.at_arrival() is not None:
            raise TransferError(f"{NAME}: copies between devices only, and converts nothing")
        sock = dial_on_this_host(offer.advert, NAME)
        try:
            num_blocks, loan = unpack_loan(one_sided_wire.receive_blob(sock))
            target = self._sharing.borrow(loan)
            if target.numel() != num_blocks * pairing.destination.region_block_bytes:
                raise TransferError("the size of the receiver's pool does not match its layout")
            sock.settimeout(None)
            return CudaIpcWriter(device, sock, target, pairing)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"{NAME}: {error}") from None
        except TransferError:
            sock.close()
            raise
