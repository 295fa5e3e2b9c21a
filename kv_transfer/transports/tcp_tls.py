"""The `tcp` transport in TLS 1.3, both ends with certificates of one private authority.

Who a peer is does not depend on names or addresses, which change from pod to pod. The receiver's certificate must be
the one whose SHA-256 fingerprint stands in its advert, and the advert came over the authenticated link; the sender's
must come from the authority, and its HELLO holds the advert's secret. So the authority should sign for workers only.
"""

import hashlib
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, POLLOUT

from kv_transfer.transports.tcp_channel import hang_up, peek, waiter
from kv_transfer.transports.tcp_pieces import Piece
from tandem.certificates import first_certificate, read_pem, shake_hands, show, trust
from tandem.errors import ConfigError

_SETTING = "transfer.tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one worker: its certificate (and what lies between it and the authority), its key, the authority."""

    cert: Path
    key: Path
    ca: Path


class TlsIdentity:
    """What a worker shows and whom it believes; one for all its connections."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files and shakes hands with itself. Raises ConfigError that names the file and what is wrong."""
        self.fingerprint = hashlib.sha256(first_certificate(files.cert, f"{_SETTING}.cert")).digest()
        """SHA-256 of the certificate in DER."""
        read_pem(files.key, f"{_SETTING}.key")
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, files)
        # Tickets would let a peer come back without its certificate being looked at.
        self._server.num_tickets = 0
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self._try(files)

    def serve(self, sock: socket.socket) -> "TlsChannel":
        """A channel for an accepted socket, which it owns; nothing is said yet. Raises OSError."""
        return TlsChannel(self._server.wrap_socket(_ready(sock), server_side=True, do_handshake_on_connect=False))

    def dial(self, sock: socket.socket) -> "TlsChannel":
        """A channel for a connected socket, which it owns; nothing is said yet. Raises OSError."""
        return TlsChannel(self._client.wrap_socket(_ready(sock), do_handshake_on_connect=False))

    def _try(self, files: TlsFiles) -> None:
        try:
            shake_hands(self._client, self._server)
        except ssl.SSLCertVerificationError as error:
            reason = f"{files.cert} is not good for {files.ca}: {error.verify_message}"
            raise ConfigError(f"{_SETTING}.cert: {reason}") from None
        except ssl.SSLError as error:
            raise ConfigError(f"{_SETTING}: no handshake is possible: {error.reason}") from None


class TlsChannel:
    """A TLS socket as a Channel. Owns it.

    OpenSSL forbids reading and writing at once, so both happen under one lock, without waiting there. A record that
    found no room must be offered again unchanged: what is sent is copied once, and its sources are free at once.
    """

    piece_bytes = 256 << 10
    descriptor = None

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._room = memoryview(bytearray(self.piece_bytes))
        self._pending = self._room[:0]
        self._reading_needs = POLLIN
        self._writing_needs = POLLOUT
        self._reading = {mask: waiter(sock, mask) for mask in (POLLIN, POLLOUT)}
        self._writing = {mask: waiter(sock, mask) for mask in (POLLIN, POLLOUT)}

    def shake_hands(self, deadline_s: float) -> None:
        """Raises OSError (ssl.SSLError) when the peer is refused, TransferError when it is too slow."""
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._reading[POLLIN](left_s)
            except ssl.SSLWantWriteError:
                self._reading[POLLOUT](left_s)

    def first_byte(self, timeout_s: float) -> int | None:
        """See Channel."""
        self._reading[POLLIN](timeout_s)
        return peek(self._sock)

    def say_plainly(self, data: bytes) -> None:
        """See Channel."""
        socket.socket.send(self._sock, data)

    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate, after the handshake."""
        return hashlib.sha256(self._sock.getpeercert(binary_form=True) or b"").digest()

    def receive(self, piece: Piece) -> int | None:
        """See Channel."""
        received = 0
        try:
            with self._lock:
                for view in piece:
                    filled = 0
                    while filled < len(view):
                        # One record at most.
                        count = self._sock.recv_into(view[filled:])
                        if not count:
                            return received
                        filled += count
                        received += count
        except ssl.SSLWantReadError:
            self._reading_needs = POLLIN
            return received or None
        except ssl.SSLWantWriteError:
            self._reading_needs = POLLOUT
            return received or None
        return received

    def send(self, piece: Piece) -> int:
        """See Channel."""
        if not self.flush():
            return 0
        filled = 0
        for view in piece:
            part = view[: self.piece_bytes - filled]
            self._room[filled : filled + len(part)] = part
            filled += len(part)
            if filled == self.piece_bytes:
                break
        self._pending = self._room[:filled]
        self.flush()
        return filled

    def flush(self) -> bool:
        """See Channel."""
        while self._pending:
            try:
                with self._lock:
                    count = self._sock.send(self._pending)
            except ssl.SSLWantWriteError:
                self._writing_needs = POLLOUT
                return False
            except ssl.SSLWantReadError:
                self._writing_needs = POLLIN
                return False
            self._pending = self._pending[count:]
        return True

    def wait_readable(self, timeout_s: float | None) -> None:
        """See Channel."""
        self._reading[self._reading_needs](timeout_s)

    def wait_writable(self, timeout_s: float | None) -> None:
        """See Channel."""
        self._writing[self._writing_needs](timeout_s)

    def hang_up(self) -> None:
        """See Channel."""
        hang_up(self._sock)

    def close(self) -> None:
        """See Channel."""
        self._sock.close()


def tls_reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if error.reason == "TLSV1_ALERT_PROTOCOL_VERSION":
        return "the peer speaks no TLS 1.3, and transfer.tls is set here"
    return f"TLS: {error.reason or error}"


def _ready(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Fingerprints instead: see the module's docstring.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    trust(context, files.ca, f"{_SETTING}.ca")
    show(context, files.cert, files.key, _SETTING)
    return context
