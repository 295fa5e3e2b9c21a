"""`torch_dist`, sending end: pieces are gathered into slots, and go through a process group from there.

Sources are read under the queue's lock, a piece at a time, so a cancel is proven at once; the slots of a cancelled
write still cross, with whatever is in them, so that both sides stay in step. When the communicator breaks (the other
side was frozen for too long, say), the write fails and the next one begins with a new communicator.
"""

import itertools
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_transfer.checksum import crc32
from kv_transfer.departure import Departure
from kv_transfer.messages import TransportOffer
from kv_transfer.pairing import Pairing
from kv_transfer.region import KVRegion
from kv_transfer.transports import claim_wire, communicator, torch_dist_wire
from kv_transfer.transports.claims import hang_up
from kv_transfer.transports.communicator import GLOO, SENDER, SLOTS, Bytes, Communicator, CommunicatorBroken
from kv_transfer.transports.dial import dial, stays_here
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.torch_dist_receiver import NAME, STALL_S
from kv_transfer.transports.torch_dist_wire import PIECE_BYTES, Header, Kind, Meeting
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError


@dataclass(slots=True, kw_only=True, eq=False)
class _Sent:
    """A write whose answer is awaited."""

    job: WriteJob
    num_bytes: int
    checksum: int = 0


class TorchDistWriter(QueuedWriter):
    """PeerWriter of the `torch_dist` transport."""

    def __init__(
        self, source: KVRegion, sock: socket.socket, meeting: Meeting, pairing: Pairing, *, stall_s: float
    ) -> None:
        self._departure = Departure(source, pairing)
        self._sock = sock
        self._meeting = meeting
        self._stall_s = stall_s
        self._ids = itertools.count(1)
        self._generations = itertools.count()
        self._unanswered: dict[int, _Sent] = {}
        host, port = sock.getpeername()[0], meeting.store_port
        self._store: Any = communicator.reach_store(host, port, stall_s)
        self._group: Communicator | None = self._renew()
        super().__init__("kv-dist-write")
        self._reader = threading.Thread(target=self._read, name="kv-dist-read", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """See PeerWriter. Waits for a piece that is crossing, `stall_s` at most."""
        self._break("connection closed")
        super().close()
        self._drop_group()
        self._reader.join()
        self._sock.close()
        self._store = None

    def _renew(self) -> Communicator:
        number = next(self._generations)
        try:
            self._sock.sendall(torch_dist_wire.pack_header(Header(kind=Kind.RENEW, number=number)))
        except OSError as error:
            raise TransferError(f"torch_dist connection lost: {error}") from None
        address = self._sock.getsockname()[0]
        return Communicator(self._store, self._meeting, number, SENDER, address=address, limit_s=self._stall_s)

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _perform(self, job: WriteJob) -> None:
        order = job.order
        if len(order.grant) != TOKEN_BYTES:
            raise TransferError("malformed grant")
        views = self._views(job)
        payload_bytes = sum(view.nbytes for view in views)
        if self._group is None:
            self._group = self._renewed()
        number = next(self._ids)
        header = Header(
            kind=Kind.WRITE, number=number, token=order.grant, cells=order.cells, payload_bytes=payload_bytes
        )
        sent = self._unanswered[number] = _Sent(job=job, num_bytes=payload_bytes)
        try:
            self._sock.sendall(torch_dist_wire.pack_header(header))
            self._send(self._group, sent, views)
        except OSError as error:
            self._break(f"torch_dist connection lost: {error}")
        except CommunicatorBroken:
            self._drop_group()
            raise

    def _renewed(self) -> Communicator:
        try:
            return self._renew()
        except TransferError as error:
            # Nobody there to make one with: the connection is of no use.
            self._break(error.message)
            raise

    def _views(self, job: WriteJob) -> list[memoryview]:
        order = job.order
        if not self._departure.converts:
            return self._departure.views(order.source, order.cells)
        with self._queue.lock:
            job.check()
            return [self._departure.convert(order.source, order.cells).data]

    def _send(self, group: Communicator, sent: _Sent, views: list[memoryview]) -> None:
        """All pieces, the checksum of what was gathered, cache-hot; it is complete before the last of them crosses."""
        for i, at in enumerate(range(0, sent.num_bytes, PIECE_BYTES)):
            slot, size = i % SLOTS, min(PIECE_BYTES, sent.num_bytes - at)
            group.wait(slot)
            piece = group.slots[slot][:size]
            with self._queue.lock:
                if not sent.job.stopped:
                    _gather(views, piece)
            sent.checksum = crc32(piece.data, sent.checksum)
            group.post(slot, size)
        for slot in range(SLOTS):
            group.wait(slot)

    def _read(self) -> None:
        try:
            while (data := claim_wire.receive_exactly(self._sock, torch_dist_wire.ANSWER_BYTES)) is not None:
                self._on_answer(*torch_dist_wire.unpack_answer(data))
            reason = "the receiver has gone"
        except (OSError, TransferError) as error:
            reason = f"torch_dist connection lost: {error}"
        self._break(reason)

    def _on_answer(self, kind: Kind, number: int) -> None:
        sent = self._unanswered.pop(number, None)
        if sent is None:
            raise TransferError("an answer to nothing")
        if kind is Kind.DONE:
            sent.job.succeed(sent.checksum, sent.num_bytes)
        else:
            sent.job.fail("the receiver refused the write")

    def _break(self, reason: str) -> None:
        self._queue.fail_all(reason)
        hang_up(self._sock)


def _gather(views: list[memoryview], piece: Bytes) -> None:
    """Fill `piece` from the front of the views, which become shorter."""
    at = 0
    while at < piece.nbytes:
        view = views[0]
        size = min(view.nbytes, piece.nbytes - at)
        np.copyto(piece[at : at + size], np.frombuffer(view[:size], np.uint8))
        at += size
        if size == view.nbytes:
            views.pop(0)
        else:
            views[0] = view[size:]


class TorchDistSender:
    """KVSender of the `torch_dist` transport."""

    name = NAME
    one_sided = False

    def __init__(self, region: KVRegion, *, isolated_network: bool = False, stall_s: float = STALL_S) -> None:
        self._region = region
        self._isolated_network = isolated_network
        self._stall_s = stall_s

    def reaches(self, offer: TransportOffer) -> bool:
        """See KVSender. Store and gloo know no secret, so what leaves this machine needs a network of its own."""
        return offer.name == NAME and (self._isolated_network or stays_here(offer.advert))

    def connect(self, offer: TransportOffer, pairing: Pairing) -> TorchDistWriter:
        """See KVSender."""
        try:
            sock = dial(offer.advert)
            try:
                meeting = torch_dist_wire.unpack_meeting(claim_wire.receive_blob(sock))
                if meeting.backend != GLOO:
                    raise TransferError(f"the receiver meets over {meeting.backend:.20}")
                sock.settimeout(None)
                return TorchDistWriter(self._region, sock, meeting, pairing, stall_s=self._stall_s)
            except (OSError, TransferError):
                sock.close()
                raise
        except (OSError, TransferError) as error:
            raise TransferError(f"{NAME}: {error}") from None
