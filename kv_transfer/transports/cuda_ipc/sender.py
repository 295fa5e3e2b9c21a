"""`cuda_ipc`, sending end: copies from this GPU's pool into the receiver's, on a CUDA stream of its own.

A chunk is copied into the peer's pool and summed by this side's device; it counts as written once the stream has
finished. No lock that a cancel or the next order needs is held meanwhile: the claim is marked busy, a
cancelled write ends with its chunk, and QUIET is sent then.
"""

import functools
import socket
import threading
from typing import Any

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.cuda_ipc.device_sharing import DeviceSharing
from kv_transfer.transports.cuda_ipc.receiver import NAME, unpack_loan
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.writer import ClaimingWriter
from kv_transfer.transports.same_host import host_id
from kv_transfer.transports.same_host_sockets import dial_on_this_host
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.values.ids import BlockId

MAX_KNOWN_GRANTS = 32


class CudaIpcWriter(ClaimingWriter):
    """PeerWriter of the `cuda_ipc` transport; `target` is the receiver's memory, opened in this process."""

    def __init__(self, source: DevicePool, sock: socket.socket, target: Any, pairing: Pairing) -> None:
        self._source = source
        self._target: TorchPool | None = TorchPool(target, pairing.destination)
        self._pairing = pairing
        self._moving = threading.Lock()
        # A hand-off has one grant for all of its chunks.
        self._destination = functools.lru_cache(MAX_KNOWN_GRANTS)(self._unpack_grant)
        super().__init__(sock, NAME)

    def close(self) -> None:
        super().close()
        # Memory of a GPU that the peer has left is freed only when no process holds it open any more.
        self._target = None

    def _perform(self, job: WriteJob) -> None:
        pool, order = self._target, job.order
        if pool is None:
            raise TransferError("connection closed")
        token, target = self._destination(order.grant, order.source.at.held_tokens, pool.num_blocks)
        reads, writes = order.source.reads(order.cells), target.writes(order.cells)
        self._claim(job, token)
        with self._moving, self._under_way(job, token):
            checksum = self._source.send(reads, pool, writes)
            job.check()
        job.succeed(checksum, reads.num_bytes)

    def _unpack_grant(self, grant: bytes, held_tokens: int, num_blocks: int) -> tuple[bytes, PlacedCells]:
        """The token of a grant, and the cells that it opens."""
        token, slots = one_sided_wire.unpack_grant(grant)
        return token, self._pairing.at_destination(held_tokens, tuple(map(BlockId, slots)), num_blocks)

    def _stopped(self) -> None:
        # Every job is stopped by now; once this lock is free, the one that was running has ended.
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
            if target.numel() != num_blocks * pairing.destination.worker_block_bytes:
                raise TransferError("the size of the receiver's pool does not match its layout")
            sock.settimeout(None)
            return CudaIpcWriter(device, sock, target, pairing)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"{NAME}: {error}") from None
        except TransferError:
            sock.close()
            raise
