"""`tcp`, receiving end: payload goes from the socket straight into the pool.

Each connection has its own thread. Bytes land under the lock of their grant, one non-blocking `recvmsg_into` at a
time, so that a revocation is proven at once: what still comes for a revoked grant is read into scratch memory, and the
connection goes on serving other grants. Hostile bytes end their own connection only.
"""

import hmac
import itertools
import json
import logging
import secrets
import socket
import threading
from contextlib import suppress

from kv_transfer.landing import Landing
from kv_transfer.messages import CellRange, TransferKey, TransportOffer
from kv_transfer.region import KVRegion
from kv_transfer.transport import QuietListener
from kv_transfer.transports import tcp_wire
from kv_transfer.transports.grants import TOKEN_BYTES, Grant, GrantTable
from kv_transfer.transports.tcp_wire import Cursor, Header, Kind
from tandem.errors import TransferError

NAME = "tcp"
MAX_CONNECTIONS = 256
"""Senders that have proven to know the secret."""
MAX_GREETING = 32
"""Strangers that have not; a newer one takes the place of the oldest."""
STALL_S = 5.0
"""Most time for a whole HELLO or header, and most silence in the middle of a payload."""
_SCRATCH_BYTES = 256 << 10
MAX_PAYLOAD_BYTES = 1 << 30
"""Of one frame, whether or not anybody wants it; many times a chunk."""
ACCEPT_PAUSE_S = 0.1
"""Between two tries to accept when the process has no room for one more connection."""

log = logging.getLogger(__name__)


class TcpReceiver:
    """KVReceiver of the `tcp` transport; listens on `host` at a free port unless told one. Raises OSError."""

    name = NAME
    drain_proves_quiet = False

    def __init__(self, region: KVRegion, *, host: str = "127.0.0.1", port: int = 0, stall_s: float = STALL_S) -> None:
        self._region = region
        self._stall_s = stall_s
        self._grants = GrantTable()
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._greeting: dict[socket.socket, None] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self._address = self._server.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def offer(self) -> TransportOffer:
        """See KVReceiver."""
        host, port = self._address
        advert = json.dumps({"host": host, "port": port, "secret": self._secret.hex()})
        return TransportOffer(name=NAME, advert=advert.encode(), host_id="")

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        """See KVReceiver."""
        return self._grants.open(key, landing).token

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """See KVReceiver."""
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """Always proven: see the module's docstring."""
        self._grants.revoke(key)
        return True

    def listen_quiet(self, listener: QuietListener) -> None:
        """Nothing to tell: every revocation is proven at once."""

    def close(self) -> None:
        """See KVReceiver."""
        self._grants.revoke_all()
        with self._lock:
            self._closing.set()
            connections = dict(self._connections)
        _hang_up(self._server)
        self._thread.join()
        self._server.close()
        for sock, thread in connections.items():
            _hang_up(sock)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _address = self._server.accept()
            except OSError as error:
                # Out of descriptors or memory: that passes, and a receiver that stopped listening would not come back.
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                log.warning("no tcp sender can be accepted now: %s", error)
                continue
            with self._lock:
                if self._closing.is_set():
                    sock.close()
                    continue
                if len(self._greeting) >= MAX_GREETING:
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    _hang_up(oldest)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._serve, args=(sock,), name="kv-tcp-peer", daemon=True)
                self._connections[sock] = thread
                self._greeting[sock] = None
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._greet(sock)
            scratch = memoryview(bytearray(_SCRATCH_BYTES))
            for number in itertools.count(1):
                tcp_wire.wait_readable(sock, None)
                header = self._next_header(sock)
                if header is None:
                    break
                if header.kind is not Kind.WRITE or header.write_id != number:
                    raise TransferError(f"frame {header.write_id} instead of {number}")
                self._answer(sock, self._take(sock, header, scratch), header.write_id)
        except (OSError, TransferError) as error:
            log.info("tcp sender dropped: %s", error)
        finally:
            with self._lock:
                del self._connections[sock]
                self._greeting.pop(sock, None)
            _hang_up(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        header = self._next_header(sock)
        if header is None or header.kind is not Kind.HELLO or not hmac.compare_digest(header.token, self._secret):
            raise TransferError("no HELLO, or a wrong secret")
        with self._lock:
            if sock not in self._greeting:
                raise TransferError("crowded out before its HELLO")
            if len(self._connections) - len(self._greeting) >= MAX_CONNECTIONS:
                raise TransferError(f"{MAX_CONNECTIONS} senders are connected")
            del self._greeting[sock]
        self._answer(sock, Kind.DONE, header.write_id)

    def _next_header(self, sock: socket.socket) -> Header | None:
        data = tcp_wire.receive_exactly(sock, tcp_wire.HEADER_BYTES, within_s=self._stall_s)
        if data is None:
            return None
        header = tcp_wire.unpack_header(data)
        if header.payload_bytes > MAX_PAYLOAD_BYTES:
            raise TransferError(f"a payload of {header.payload_bytes} bytes: at most {MAX_PAYLOAD_BYTES} are taken")
        return header

    def _answer(self, sock: socket.socket, kind: Kind, write_id: int) -> None:
        try:
            count = sock.send(tcp_wire.pack_answer(kind, write_id), socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        if count != tcp_wire.ANSWER_BYTES:
            raise TransferError("the sender does not read its answers")

    def _take(self, sock: socket.socket, header: Header, scratch: memoryview) -> Kind:
        """Receive a payload into its destinations, or past them when it has none."""
        grant = self._grants.find(header.token)
        cursor = self._destinations(header, grant)
        remaining = header.payload_bytes
        while remaining:
            try:
                count = self._land(sock, grant, cursor) if grant and cursor else None
                if count is None:
                    cursor = None
                    count = sock.recv_into(scratch, min(remaining, _SCRATCH_BYTES), socket.MSG_DONTWAIT)
            except BlockingIOError:
                tcp_wire.wait_readable(sock, self._stall_s)
                continue
            if count == 0:
                raise TransferError("the sender ended in the middle of a frame")
            remaining -= count
        return Kind.REFUSED if cursor is None else Kind.DONE

    def _destinations(self, header: Header, grant: Grant | None) -> Cursor | None:
        if grant is None:
            return None
        try:
            cursor = Cursor(grant.landing.room(header.cells))
        except TransferError:
            return None
        if cursor.remaining != header.payload_bytes:
            raise TransferError(f"{header.payload_bytes} payload bytes do not fit their cells")
        return cursor

    def _land(self, sock: socket.socket, grant: Grant, cursor: Cursor) -> int | None:
        """Bytes received into the pool; None once the grant is revoked."""
        with grant.lock:
            if grant.revoked:
                return None
            count = sock.recvmsg_into(cursor.views(), 0, socket.MSG_DONTWAIT)[0]
            cursor.advance(count)
            return count


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
