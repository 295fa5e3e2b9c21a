"""`torch_dist`, sending end: a write's payload goes through a process group with one peer.

Host memory goes over gloo, burst by burst; payload between pools on two GPUs goes over NCCL without touching host
memory (see device_to_device.py). When the communicator breaks (for example because the other side was frozen too long),
the write fails and the next one starts with a new communicator.
"""

import itertools
import logging
import socket
import threading
from dataclasses import dataclass
from typing import Any

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.departure import Departure
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.dial import dial, is_loopback_advert
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import hang_up
from kv_transfer.transports.torch_dist import communicator, nccl
from kv_transfer.transports.torch_dist import wire as torch_dist_wire
from kv_transfer.transports.torch_dist.communicator import (
    SENDER,
    Communicator,
    CommunicatorBroken,
    Rendezvous,
    over_gloo,
)
from kv_transfer.transports.torch_dist.device_to_device import between_devices, can_write_directly
from kv_transfer.transports.torch_dist.parcels import DevicePacker, HostPacker, PackedWrite, Packer
from kv_transfer.transports.torch_dist.receiver import NAME, STALL_S
from kv_transfer.transports.torch_dist.wire import MessageHeader, MessageKind, RendezvousOffer
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sent:
    """A write that is not answered yet."""

    job: WriteJob
    parcel: PackedWrite


class TorchDistWriter(QueuedWriter):
    """PeerWriter of the `torch_dist` transport. `pool`: this side's, when payload goes from device to device."""

    def __init__(
        self,
        departure: Departure,
        pool: DevicePool | None,
        sock: socket.socket,
        meeting: RendezvousOffer,
        *,
        stall_s: float,
    ) -> None:
        self._departure = departure
        self._pool = pool
        self._sock = sock
        self._meeting = meeting
        self._stall_s = stall_s
        self._ids = itertools.count(1)
        self._generations = itertools.count()
        self._unanswered: dict[int, _Sent] = {}
        host, port = sock.getpeername()[0], meeting.store_port
        self._store: Any = communicator.reach_store(host, port, stall_s)
        self._group: Communicator | None = None
        self._packer: Packer | None = self._first()
        super().__init__("kv-dist-write")
        self._reader = threading.Thread(target=self._read, name="kv-dist-read", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Close everything; waits for a crossing payload or a communicator being made, up to their time limits."""
        self._break("connection closed")
        super().close()
        self._drop_group()
        self._reader.join()
        self._unanswered.clear()
        self._sock.close()
        self._store = None

    def _first(self) -> Packer:
        try:
            return self._renew()
        except CommunicatorBroken as error:
            if self._pool is None:
                raise
            log.warning("torch_dist: NCCL does not reach the peer's GPU, so KV goes through both hosts: %s", error)
            self._pool = None
            return self._renew()

    def _renew(self) -> Packer:
        number = next(self._generations)
        kind = MessageKind.RENEW if self._pool is None else MessageKind.RENEW_DIRECT
        try:
            self._sock.sendall(torch_dist_wire.pack_header(MessageHeader(kind=kind, number=number)))
        except OSError as error:
            raise TransferError(f"torch_dist connection lost: {error}") from None
        at = Rendezvous(
            store=self._store,
            meeting=self._meeting,
            number=number,
            rank=SENDER,
            address=self._sock.getsockname()[0],
            limit_s=self._stall_s,
        )
        if self._pool is None:
            self._group = over_gloo(at)
            return HostPacker(self._departure, self._group)
        self._group = between_devices(self._pool, at)
        return DevicePacker(self._pool, self._group)

    def _drop_group(self) -> None:
        group, self._group, self._packer = self._group, None, None
        if group is not None:
            group.close()

    def _perform(self, job: WriteJob) -> None:
        order = job.order
        if len(order.grant) != TOKEN_BYTES:
            raise TransferError("malformed grant")
        if self._packer is None:
            self._packer = self._renewed()
        parcel = self._packer.pack(job, self._queue)
        number = next(self._ids)
        header = MessageHeader(
            kind=MessageKind.WRITE, number=number, token=order.grant, cells=order.cells, payload_bytes=parcel.num_bytes
        )
        self._unanswered[number] = _Sent(job=job, parcel=parcel)
        try:
            self._sock.sendall(torch_dist_wire.pack_header(header))
            parcel.send()
        except OSError as error:
            self._break(f"torch_dist connection lost: {error}")
        except CommunicatorBroken:
            self._drop_group()
            raise

    def _renewed(self) -> Packer:
        try:
            return self._renew()
        except TransferError as error:
            # The peer does not join a new communicator: the connection is of no use.
            self._break(error.message)
            raise

    def _read(self) -> None:
        try:
            while (data := one_sided_wire.receive_exactly(self._sock, torch_dist_wire.ANSWER_BYTES)) is not None:
                self._on_answer(*torch_dist_wire.unpack_answer(data))
            reason = "the receiver has disconnected"
        except (OSError, TransferError) as error:
            reason = f"torch_dist connection lost: {error}"
        self._break(reason)

    def _on_answer(self, kind: MessageKind, number: int) -> None:
        sent = self._unanswered.pop(number, None)
        if sent is None:
            raise TransferError("an answer without a write")
        if kind is MessageKind.DONE:
            sent.job.succeed(sent.parcel.checksum, sent.parcel.num_bytes)
        else:
            sent.job.fail("the receiver refused the write")

    def _break(self, reason: str) -> None:
        self._queue.fail_all(reason)
        hang_up(self._sock)


class TorchDistSender:
    """KVSender of the `torch_dist` transport."""

    name = NAME
    one_sided = False

    def __init__(self, region: KVRegion, *, isolated_network: bool = False, stall_s: float = STALL_S) -> None:
        self._region = region
        self._isolated_network = isolated_network
        self._stall_s = stall_s
        nccl.prepare(stall_s)

    def reaches(self, offer: TransportOffer) -> bool:
        """Whether the offer is usable: store and gloo authenticate nobody, so other machines require an isolated
        network."""
        return offer.name == NAME and (self._isolated_network or is_loopback_advert(offer.advert))

    def connect(self, offer: TransportOffer, pairing: Pairing) -> TorchDistWriter:
        try:
            sock = dial(offer.advert)
            try:
                meeting = torch_dist_wire.unpack_rendezvous(one_sided_wire.receive_blob(sock))
                sock.settimeout(None)
                direct = can_write_directly(self._region, pairing, meeting, isolated_network=self._isolated_network)
                pool = self._region.device if direct else None
                departure = Departure(self._region, pairing)
                return TorchDistWriter(departure, pool, sock, meeting, stall_s=self._stall_s)
            except (OSError, TransferError):
                sock.close()
                raise
        except (OSError, TransferError) as error:
            raise TransferError(f"{NAME}: {error}") from None
