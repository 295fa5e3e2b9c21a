"""`tcp`, sending end: payload goes from the pool straight into the socket.

Two threads a connection: one sends frames, one reads answers. Sources are read under the queue's lock, one
non-blocking `sendmsg` at a time; a cancelled frame is filled up with zeros, so that the stream stays in step.
"""

import itertools
import json
import socket
import threading
from contextlib import suppress
from zlib import crc32

from kv_transfer.departure import Departure
from kv_transfer.messages import TransportOffer
from kv_transfer.pairing import Pairing
from kv_transfer.region import KVRegion
from kv_transfer.transports import tcp_wire
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.tcp_receiver import NAME, STALL_S
from kv_transfer.transports.tcp_wire import Cursor, Header, Kind
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError

CONNECT_S = 5.0
_ZEROS = bytes(256 << 10)


class TcpWriter(QueuedWriter):
    """PeerWriter of the `tcp` transport."""

    def __init__(self, source: KVRegion, sock: socket.socket, pairing: Pairing, *, stall_s: float = STALL_S) -> None:
        self._departure = Departure(source, pairing)
        self._sock = sock
        self._stall_s = stall_s
        self._ids = itertools.count(1)
        self._unanswered: dict[int, tuple[WriteJob, int, int]] = {}
        super().__init__("kv-tcp-write")
        self._reader = threading.Thread(target=self._read, name="kv-tcp-read", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """See PeerWriter."""
        self._break("connection closed")
        super().close()
        self._reader.join()
        self._sock.close()

    def _perform(self, job: WriteJob) -> None:
        if len(job.order.grant) != TOKEN_BYTES:
            raise TransferError("malformed grant")
        views = self._views(job)
        checksum = self._checksum(job, views)
        cursor = Cursor(views)
        payload_bytes = cursor.remaining
        write_id = next(self._ids)
        header = Header(
            kind=Kind.WRITE,
            write_id=write_id,
            token=job.order.grant,
            cells=job.order.cells,
            payload_bytes=payload_bytes,
        )
        self._unanswered[write_id] = (job, checksum, payload_bytes)
        try:
            self._sock.sendall(tcp_wire.pack_header(header), socket.MSG_MORE)
            while cursor.remaining:
                self._send_some(job, cursor)
        except (OSError, TransferError) as error:
            self._break(f"tcp connection lost: {error}")

    def _views(self, job: WriteJob) -> list[memoryview]:
        order = job.order
        if not self._departure.converts:
            return self._departure.views(order.source, order.cells)
        with self._queue.lock:
            job.check()
            return [self._departure.convert(order.source, order.cells).data]

    def _checksum(self, job: WriteJob, views: list[memoryview]) -> int:
        value = 0
        for view in views:
            with self._queue.lock:
                job.check()
                value = crc32(view, value)
        return value

    def _send_some(self, job: WriteJob, cursor: Cursor) -> None:
        try:
            with self._queue.lock:
                if not job.stopped:
                    cursor.advance(self._sock.sendmsg(cursor.views(), [], socket.MSG_DONTWAIT))
                    return
            size = min(cursor.remaining, len(_ZEROS))
            cursor.advance(self._sock.send(memoryview(_ZEROS)[:size], socket.MSG_DONTWAIT))
        except BlockingIOError:
            tcp_wire.wait_writable(self._sock, self._stall_s)

    def _read(self) -> None:
        try:
            while True:
                tcp_wire.wait_readable(self._sock, None)
                data = tcp_wire.receive_exactly(self._sock, tcp_wire.ANSWER_BYTES, within_s=self._stall_s)
                if data is None:
                    break
                self._on_answer(*tcp_wire.unpack_answer(data))
            reason = "the receiver has gone"
        except (OSError, TransferError) as error:
            reason = f"tcp connection lost: {error}"
        self._break(reason)

    def _on_answer(self, kind: Kind, write_id: int) -> None:
        job, checksum, num_bytes = self._unanswered.pop(write_id, (None, 0, 0))
        if job is None:
            raise TransferError("an answer to nothing")
        if kind is Kind.DONE:
            job.succeed(checksum, num_bytes)
        else:
            job.fail("the receiver refused the write")

    def _break(self, reason: str) -> None:
        self._queue.fail_all(reason)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class TcpSender:
    """KVSender of the `tcp` transport."""

    name = NAME
    one_sided = False

    def __init__(self, region: KVRegion, *, stall_s: float = STALL_S) -> None:
        self._region = region
        self._stall_s = stall_s

    def reaches(self, offer: TransportOffer) -> bool:
        """See KVSender."""
        return offer.name == NAME

    def connect(self, offer: TransportOffer, pairing: Pairing) -> TcpWriter:
        """See KVSender."""
        host, port, secret = _parse(offer.advert)
        try:
            sock = socket.create_connection((host, port), CONNECT_S)
        except OSError as error:
            raise TransferError(f"tcp {host}:{port}: {error}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = Header(kind=Kind.HELLO, write_id=0, token=secret, cells=tcp_wire.NO_CELLS, payload_bytes=0)
            sock.sendall(tcp_wire.pack_header(hello))
            answer = tcp_wire.receive_exactly(sock, tcp_wire.ANSWER_BYTES, within_s=CONNECT_S)
            if answer is None or tcp_wire.unpack_answer(answer) != (Kind.DONE, 0):
                raise TransferError("the receiver refused the connection")
            sock.settimeout(None)
        except (OSError, TransferError) as error:
            sock.close()
            raise TransferError(f"tcp {host}:{port}: {error}") from None
        return TcpWriter(self._region, sock, pairing, stall_s=self._stall_s)


def _parse(advert: bytes) -> tuple[str, int, bytes]:
    try:
        data = json.loads(advert)
        host, port, secret = str(data["host"]), int(data["port"]), bytes.fromhex(data["secret"])
    except (ValueError, KeyError, TypeError):
        raise TransferError("not an advert of the tcp transport") from None
    if len(secret) != TOKEN_BYTES:
        raise TransferError("not an advert of the tcp transport")
    return host, port, secret
