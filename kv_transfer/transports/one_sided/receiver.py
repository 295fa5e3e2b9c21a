"""Receiving ends whose memory writers access by themselves; claims record who may be writing.

Bytes land without this process's help, so a revocation is proven by the writer's QUIET or by the end of its socket: a
running writer closes it only after its last byte, and a killed one cannot write. `_part` does what a transport still
needs before its memory is quiet. A frozen writer cannot be proven quiet, unless the transport can shut it out
(`shut_out_s`).
"""

import hmac
import logging
import secrets
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.accept import accept_connections, start_serving
from kv_transfer.transports.grants import TOKEN_BYTES, GrantTable
from kv_transfer.transports.interface import QuietListener
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.wire import ClaimKind
from tandem.errors import TransferError
from tandem.rpc.refusal_log import RefusalLog

HELLO_S = 5.0
PARTING_S = 1.0
"""Total time for all writers to report that they have stopped, when the receiver closes."""
MAX_WRITERS = 256

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Writer:
    sock: socket.socket
    thread: threading.Thread | None = None
    claims: dict[bytes, TransferKey] = field(default_factory=dict)
    revoked_s: float | None = None
    """Monotonic time at which the oldest unanswered revocation was sent."""
    resource: object | None = None
    """Resource that the transport opened for this writer."""


class ClaimReceiver(ABC):
    """Base of the KVReceivers that serve writers at `server`, which it owns."""

    shut_out_s: float | None = None
    """Time without an answer to a revocation after which a writer is shut out; None if the transport cannot do that."""

    def __init__(self, server: socket.socket, name: str) -> None:
        self._name = name
        self._refusals = RefusalLog(name)
        self._grants = GrantTable()
        self._lock = threading.Lock()
        self._writers: set[Writer] = set()
        self._listener: QuietListener = lambda _key: None
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._closing = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._accept, name=f"kv-{name}-accept", daemon=True)
        self._thread.start()

    @abstractmethod
    def offer(self) -> TransportOffer: ...

    @abstractmethod
    def _refuses(self, sock: socket.socket) -> str | None:
        """Reason to refuse a new connection; None to accept it."""

    @abstractmethod
    def _welcome(self, writer: Writer) -> None:
        """Describe the memory to a writer that has sent the secret. Raises OSError or TransferError."""

    @abstractmethod
    def _part(self, writer: Writer) -> None:
        """Called when the writer has ended or is shut out: on return nothing written by it lands any more."""

    @property
    def name(self) -> str:
        return self._name

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        grant = self._grants.open(key, landing)
        return one_sided_wire.pack_grant(grant.token, landing.cells.at.blocks)

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """End a grant: proven at once if no writer has claimed it, otherwise by the writer's answer or end."""
        with self._lock:
            grant = self._grants.revoke(key)
            if grant is None:
                return not self._is_claimed(key) and self._grants.is_quiet(key)
            writer = next((w for w in self._writers if grant.token in w.claims), None)
            if writer is None:
                return self._grants.is_quiet(key)
            writer.revoked_s = writer.revoked_s or time.monotonic()
            # If sending fails, the writer's end is the proof.
            one_sided_wire.send(writer.sock, ClaimKind.REVOKE, grant.token)
        return False

    def listen_quiet(self, listener: QuietListener) -> None:
        self._listener = listener
        self._grants.listen_quiet(self._on_settled)

    def _on_settled(self, key: TransferKey) -> None:
        """Report a key whose settling on this worker's own device has ended, unless a writer still claims it."""
        with self._lock:
            if self._is_claimed(key):
                return
        self._listener(key)

    def _is_claimed(self, key: TransferKey) -> bool:
        return any(key in writer.claims.values() for writer in self._writers)

    def _on_unclaimed(self, key: TransferKey) -> None:
        """Report a key that no writer claims any more. Both callers check the other side last, so that one of them
        reports."""
        if self._grants.is_quiet(key):
            self._listener(key)

    def close(self) -> None:
        """Stop serving. Writers see the end, stop and disconnect; those that take longer than PARTING_S are not
        awaited."""
        with self._lock:
            self._closing.set()
            writers = list(self._writers)
        hang_up(self._server)
        self._thread.join()
        for writer in writers:
            send_goodbye(writer.sock)
        latest_s = time.monotonic() + PARTING_S
        for writer in writers:
            if writer.thread is not None:
                writer.thread.join(max(0.0, latest_s - time.monotonic()))
                hang_up(writer.sock)
                writer.thread.join()
        self._server.close()

    def _accept(self) -> None:
        for sock in accept_connections(self._server, self._closing, self._refusals):
            if (refusal := self._refuses(sock)) is not None:
                self._refusals.record("a connection was refused", refusal)
                sock.close()
                continue
            writer = Writer(sock=sock)
            with self._lock:
                if self._closing.is_set() or len(self._writers) >= MAX_WRITERS:
                    sock.close()
                    continue
                # Under the lock, so that close() finds a thread to join.
                thread_name = f"kv-{self._name}-peer"
                writer.thread = threading.Thread(target=self._serve, args=(writer,), name=thread_name, daemon=True)
                if not start_serving(writer.thread, self._refusals):
                    sock.close()
                    continue
                self._writers.add(writer)

    def _serve(self, writer: Writer) -> None:
        is_known = False
        try:
            self._handshake(writer)
            is_known = True
            while (message := self._next(writer)) is not None:
                self._on_message(writer, *message)
        except (OSError, TransferError) as error:
            if is_known:
                log.info("%s writer dropped: %s", self._name, error)
            else:
                self._refusals.record("a connection was dropped before it was served", error)
            if writer.claims and self.shut_out_s is None:
                _await_end(writer.sock)
        self._drop(writer)

    def _handshake(self, writer: Writer) -> None:
        writer.sock.settimeout(HELLO_S)
        hello = one_sided_wire.receive(writer.sock)
        if hello is None:
            raise TransferError("no HELLO")
        kind, secret = hello
        if kind is not ClaimKind.HELLO or not hmac.compare_digest(secret, self._secret):
            raise TransferError("wrong secret")
        self._welcome(writer)
        writer.sock.settimeout(None)

    def _next(self, writer: Writer) -> tuple[ClaimKind, bytes] | None:
        """The next message; None at the end. Raises TransferError when a revocation is overdue and the writer can be
        shut out."""
        if self.shut_out_s is not None:
            poller = select.poll()
            poller.register(writer.sock, select.POLLIN)
            while not poller.poll(self.shut_out_s * 500):
                revoked_s = writer.revoked_s
                if revoked_s is not None and time.monotonic() - revoked_s > self.shut_out_s:
                    raise TransferError("a revocation is not answered")
        return one_sided_wire.receive(writer.sock)

    def _on_message(self, writer: Writer, kind: ClaimKind, token: bytes) -> None:
        if kind is ClaimKind.CLAIM:
            with self._lock:
                grant = self._grants.find(token)
                if grant is not None and all(token not in w.claims for w in self._writers):
                    writer.claims[token] = grant.key
                answer = ClaimKind.CLAIMED if token in writer.claims else ClaimKind.REFUSED
                if not one_sided_wire.send(writer.sock, answer, token):
                    raise TransferError("writer does not read")
        elif kind is ClaimKind.QUIET:
            with self._lock:
                key = writer.claims.pop(token, None)
                if all(self._grants.find(claimed) is not None for claimed in writer.claims):
                    writer.revoked_s = None
            if key is not None:
                self._on_unclaimed(key)
        else:
            raise TransferError(f"{kind.name} is not for a receiver")

    def _drop(self, writer: Writer) -> None:
        hang_up(writer.sock)
        self._part(writer)
        writer.sock.close()
        with self._lock:
            self._writers.discard(writer)
            keys = list(writer.claims.values())
            writer.claims.clear()
            if self._closing.is_set() and self.shut_out_s is None:
                return  # this side closed the socket, so its end proves nothing
        for key in keys:
            self._on_unclaimed(key)


def _await_end(sock: socket.socket) -> None:
    """Tell the writer to stop, and wait until it disconnects: only its own end proves that it no longer copies."""
    send_goodbye(sock)
    with suppress(OSError):
        sock.settimeout(None)
        while sock.recv(4096):
            pass


def send_goodbye(sock: socket.socket) -> None:
    """Shut down the sending direction only: the peer may still answer."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def hang_up(sock: socket.socket) -> None:
    """Shut down both directions; wakes calls that wait on the socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
