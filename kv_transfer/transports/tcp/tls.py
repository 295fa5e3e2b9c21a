"""The `tcp` transport over TLS 1.3, with certificates of one private authority at both ends.

Peers are not identified by names or addresses, which change from pod to pod. The receiver's certificate must be the one
whose SHA-256 fingerprint is in its advert, which came over the authenticated link; the sender's must be signed by the
authority, and its HELLO holds the advert's secret. The authority should therefore sign for workers only.
"""

import socket
import ssl
import threading
import time
from select import POLLIN, POLLOUT

from kv_transfer.transports.tcp.bursts import Burst
from kv_transfer.transports.tcp.channel import hang_up, peek, waiter
from tandem.rpc.mutual_tls import TlsFiles, peer_fingerprint
from tandem.rpc.renewable_tls import RenewableTls


class TlsIdentity:
    """What a worker shows and whom it believes; each new connection uses the files as they are then. Thread-safe.

    Between an advert and the connection that it leads to the files may be renewed. That connection fails, and with it
    the link, whose next HELLO holds an advert of the new certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files and do a handshake with itself. Raises ConfigError that names the file and what is wrong."""
        self._tls = RenewableTls(files, use="KV over tcp")
        self.files = files
        self.setting = files.setting
        """The configuration's name of what the files are given for."""

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate in force, in DER."""
        return self._tls.current().tls.fingerprint

    def serve(self, sock: socket.socket) -> "TlsChannel":
        """A channel for an accepted socket, which it owns; nothing is said yet. Raises OSError."""
        context = self._tls.current().tls.server
        return TlsChannel(context.wrap_socket(_ready(sock), server_side=True, do_handshake_on_connect=False))

    def dial(self, sock: socket.socket) -> "TlsChannel":
        """A channel for a connected socket, which it owns; nothing is said yet. Raises OSError."""
        context = self._tls.current().tls.client
        return TlsChannel(context.wrap_socket(_ready(sock), do_handshake_on_connect=False))


class TlsChannel:
    """ByteChannel of a TLS socket, which it owns.

    OpenSSL forbids concurrent reading and writing, so both happen under one lock, which is never held while waiting. A
    record that did not fit must be offered again unchanged; bytes are therefore copied once, and their memory is free
    at once.
    """

    burst_bytes = 256 << 10
    descriptor = None

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._room = memoryview(bytearray(self.burst_bytes))
        self._pending = self._room[:0]
        self._reading_needs = POLLIN
        self._writing_needs = POLLOUT
        self._reading = {mask: waiter(sock, mask) for mask in (POLLIN, POLLOUT)}
        self._writing = {mask: waiter(sock, mask) for mask in (POLLIN, POLLOUT)}

    def do_handshake(self, deadline_s: float) -> None:
        """Complete the handshake. Raises OSError (ssl.SSLError) when the peer is refused, TransferError when it is too
        slow."""
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
        self._reading[POLLIN](timeout_s)
        return peek(self._sock)

    def send_in_the_clear(self, data: bytes) -> None:
        socket.socket.send(self._sock, data)

    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate, after the handshake."""
        return peer_fingerprint(self._sock)

    def receive(self, burst: Burst) -> int | None:
        received = 0
        try:
            with self._lock:
                for view in burst:
                    filled = 0
                    while filled < len(view):
                        # At most one record.
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

    def send(self, burst: Burst) -> int:
        if not self.flush():
            return 0
        filled = 0
        for view in burst:
            part = view[: self.burst_bytes - filled]
            self._room[filled : filled + len(part)] = part
            filled += len(part)
            if filled == self.burst_bytes:
                break
        self._pending = self._room[:filled]
        self.flush()
        return filled

    def flush(self) -> bool:
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
        self._reading[self._reading_needs](timeout_s)

    def wait_writable(self, timeout_s: float | None) -> None:
        self._writing[self._writing_needs](timeout_s)

    def hang_up(self) -> None:
        hang_up(self._sock)

    def close(self) -> None:
        self._sock.close()


def _ready(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
