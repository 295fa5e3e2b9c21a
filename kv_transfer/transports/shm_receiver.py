"""`shm`, receiving end: passes the pool's memfd to writers of the same user and keeps track of who may write.

Bytes land without this process doing anything, so a revocation is proven only by the writer itself (QUIET) or by its
death (the end of its socket); a frozen writer stays unproven.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from kv_transfer.landing import Landing
from kv_transfer.messages import CellRange, TransferKey, TransportOffer
from kv_transfer.mover import load_mover
from kv_transfer.region import KVRegion
from kv_transfer.transport import QuietListener
from kv_transfer.transports import shm_wire
from kv_transfer.transports.grants import TOKEN_BYTES, GrantTable
from kv_transfer.transports.host import host_id
from kv_transfer.transports.shm_wire import Kind
from tandem.errors import TransferError

NAME = "shm"
HELLO_S = 5.0
MAX_WRITERS = 256
_CREDENTIALS = struct.Struct("iII")
ACCEPT_PAUSE_S = 0.1
"""Between two tries to accept when the process has no room for one more connection."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Writer:
    sock: socket.socket
    thread: threading.Thread | None = None
    claims: dict[bytes, TransferKey] = field(default_factory=dict)


class ShmReceiver:
    """KVReceiver of the `shm` transport. Raises ValueError for a region that cannot be shared."""

    name = NAME
    drain_proves_quiet = True

    def __init__(self, region: KVRegion) -> None:
        if region.fd is None:
            raise ValueError("the KV region is not shared memory")
        load_mover()  # now rather than with the first chunk
        self._fd = region.fd
        self._num_blocks = region.num_blocks
        self._grants = GrantTable()
        self._lock = threading.Lock()
        self._writers: set[_Writer] = set()
        self._listener: QuietListener = lambda _key: None
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._closing = threading.Event()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._address = shm_wire.random_name()
        self._server.bind(self._address)
        self._server.listen(MAX_WRITERS)
        self._thread = threading.Thread(target=self._accept, name="kv-shm-accept", daemon=True)
        self._thread.start()

    def offer(self) -> TransportOffer:
        """See KVReceiver."""
        return TransportOffer(name=NAME, advert=self._secret + self._address.encode(), host_id=host_id())

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        """See KVReceiver."""
        grant = self._grants.open(key, landing)
        return shm_wire.pack_grant(grant.token, landing.cells.at.blocks)

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """See KVReceiver."""
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """Proven at once when no writer has claimed the grant; else its answer or its end is the proof."""
        with self._lock:
            grant = self._grants.revoke(key)
            if grant is None:
                return all(key not in writer.claims.values() for writer in self._writers)
            writer = next((w for w in self._writers if grant.token in w.claims), None)
            if writer is None:
                return True
            # When this cannot be said the writer's end is awaited.
            shm_wire.send(writer.sock, Kind.REVOKE, grant.token)
        return False

    def listen_quiet(self, listener: QuietListener) -> None:
        """See KVReceiver."""
        self._listener = listener

    def close(self) -> None:
        """Stop serving. Writers see the end of their sockets and stop; the memory itself stays mapped with them."""
        with self._lock:
            self._closing.set()
            writers = list(self._writers)
        _hang_up(self._server)
        self._thread.join()
        for writer in writers:
            _hang_up(writer.sock)
            if writer.thread is not None:
                writer.thread.join()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _address = self._server.accept()
            except OSError as error:
                # Out of descriptors or memory: that passes, and a receiver that stopped listening would not come back.
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                log.warning("no shm writer can be accepted now: %s", error)
                continue
            if (uid := _peer_uid(sock)) != os.getuid():
                log.info("shm writer of uid %d refused", uid)
                sock.close()
                continue
            writer = _Writer(sock=sock)
            with self._lock:
                if self._closing.is_set() or len(self._writers) >= MAX_WRITERS:
                    sock.close()
                    continue
                self._writers.add(writer)
                # Under the lock, so that close() finds a thread that it can join.
                writer.thread = threading.Thread(target=self._serve, args=(writer,), name="kv-shm-peer", daemon=True)
                writer.thread.start()

    def _serve(self, writer: _Writer) -> None:
        try:
            self._greet(writer.sock)
            while (message := shm_wire.receive(writer.sock)) is not None:
                self._on_message(writer, *message)
        except (OSError, TransferError) as error:
            log.info("shm writer dropped: %s", error)
            if writer.claims:
                _await_end(writer.sock)
        self._drop(writer)

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(HELLO_S)
        hello = shm_wire.receive(sock)
        if hello is None:
            raise TransferError("no HELLO")
        kind, secret = hello
        if kind is not Kind.HELLO or not hmac.compare_digest(secret, self._secret):
            raise TransferError("wrong secret")
        shm_wire.send_region(sock, self._num_blocks, self._fd)
        sock.settimeout(None)

    def _on_message(self, writer: _Writer, kind: Kind, token: bytes) -> None:
        if kind is Kind.CLAIM:
            with self._lock:
                grant = self._grants.find(token)
                if grant is not None and all(token not in w.claims for w in self._writers):
                    writer.claims[token] = grant.key
                answer = Kind.CLAIMED if token in writer.claims else Kind.REFUSED
                if not shm_wire.send(writer.sock, answer, token):
                    raise TransferError("writer does not read")
        elif kind is Kind.QUIET:
            with self._lock:
                key = writer.claims.pop(token, None)
            if key is not None:
                self._listener(key)
        else:
            raise TransferError(f"{kind.name} is not for a receiver")

    def _drop(self, writer: _Writer) -> None:
        """The socket has ended: so has the process behind it, or at least its copying (see ShmWriter.close)."""
        _hang_up(writer.sock)
        writer.sock.close()
        with self._lock:
            self._writers.discard(writer)
            keys = list(writer.claims.values())
            writer.claims.clear()
            if self._closing.is_set():
                return  # the end of the socket was our doing and proves nothing
        for key in keys:
            self._listener(key)


def _peer_uid(sock: socket.socket) -> int:
    """Of whoever connected, by the kernel's word; see unix(7), SO_PEERCRED."""
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _await_end(sock: socket.socket) -> None:
    """Tell the writer to stop, and wait until it hangs up: only its own end proves that it copies no more."""
    with suppress(OSError):
        sock.settimeout(None)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
