"""Byte streams that carry frames, on non-blocking sockets: plain ones here, TLS in tls.py.

A channel is read on one thread and written on one thread, possibly another. `hang_up` may be called on any thread.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from typing import Protocol

from kv_transfer.transports.tcp.bursts import Burst
from tandem.errors import TransferError


class ByteChannel(Protocol):
    """A bidirectional stream of bytes. Every method may raise OSError."""

    @property
    def descriptor(self) -> int | None:
        """Descriptor of a socket that compiled code may use directly; None if it may not."""

    def first_byte(self, timeout_s: float) -> int | None:
        """Peek at the first byte; None when the peer has ended. Raises TransferError when none comes in time."""

    def send_in_the_clear(self, data: bytes) -> None:
        """Send a few unencrypted bytes before anything else, to a peer whose use of TLS differs."""

    @property
    def burst_bytes(self) -> int:
        """Number of bytes to move in one call; bounds the time that the call takes."""

    def receive(self, burst: Burst) -> int | None:
        """Fill the front of `burst` with received bytes; returns their number, 0 at the end, None when none have come
        yet."""

    def send(self, burst: Burst) -> int:
        """Take bytes from the front of `burst`, as many as fit; returns their number. Their memory may be reused at
        once."""

    def flush(self) -> bool:
        """Pass on to the kernel the bytes that `send` has taken; False when some of them do not fit yet."""

    def wait_readable(self, timeout_s: float | None) -> None:
        """Wait after `receive` got less than it could take. Raises TransferError when nothing comes in time."""

    def wait_writable(self, timeout_s: float | None) -> None:
        """Wait after `send` or `flush` left bytes over. Raises TransferError when no room comes in time."""

    def hang_up(self) -> None:
        """Shut down both directions; wakes blocked calls. Never fails."""

    def close(self) -> None:
        """Close the descriptor; no thread may use the channel any more."""


class PlainChannel:
    """ByteChannel of a connected TCP socket, which it owns."""

    # About what a second-level cache still holds when it is checksummed; larger bursts save few calls.
    burst_bytes = 256 << 10

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable = waiter(sock, POLLIN)
        self._writable = waiter(sock, POLLOUT)

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def first_byte(self, timeout_s: float) -> int | None:
        self._readable(timeout_s)
        return peek(self._sock)

    def send_in_the_clear(self, data: bytes) -> None:
        self._sock.send(data)

    def receive(self, burst: Burst) -> int | None:
        try:
            if len(burst) == 1:
                return self._sock.recv_into(burst[0])
            return self._sock.recvmsg_into(burst)[0]
        except BlockingIOError:
            return None

    def send(self, burst: Burst) -> int:
        try:
            return self._sock.sendmsg(burst)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        """Always True: `send` keeps nothing back."""
        return True

    def wait_readable(self, timeout_s: float | None) -> None:
        self._readable(timeout_s)

    def wait_writable(self, timeout_s: float | None) -> None:
        self._writable(timeout_s)

    def hang_up(self) -> None:
        hang_up(self._sock)

    def close(self) -> None:
        self._sock.close()


def waiter(sock: socket.socket, mask: int) -> Callable[[float | None], None]:
    """A function for one thread that waits for an event of `mask`; it raises TransferError when none comes in time."""
    poller = poll()
    poller.register(sock, mask)

    def wait(timeout_s: float | None) -> None:
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            raise TransferError("the peer stalled in the middle of a frame")

    return wait


def peek(sock: socket.socket) -> int | None:
    """The next received byte, below any cipher on the socket; None at the end."""
    seen = socket.socket.recv(sock, 1, socket.MSG_PEEK)
    return seen[0] if seen else None


def hang_up(sock: socket.socket) -> None:
    """Shut down both directions of a socket; on any thread."""
    with suppress(OSError):
        # SSLSocket's own method drops the cipher: a concurrent reader would get ciphertext.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def receive_exactly(channel: ByteChannel, size: int, *, within_s: float, patient: bool = False) -> bytes | None:
    """Receive `size` bytes; None when the peer ended before the first.

    All of them must come within `within_s` seconds, counted from now or, if `patient`, from the first byte. Raises
    OSError, or TransferError for a peer that is too slow or ends in the middle.
    """
    deadline_s = None if patient else time.monotonic() + within_s
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = channel.receive([rest])
        if count is None:
            channel.wait_readable(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        elif count == 0:
            if len(rest) < size:
                raise TransferError("the peer ended in the middle of a frame")
            return None
        else:
            rest = rest[count:]
            if deadline_s is None:
                deadline_s = time.monotonic() + within_s
    return bytes(data)


def send_exactly(channel: ByteChannel, data: bytes, *, stall_s: float) -> None:
    """Send all of `data`. Raises OSError, or TransferError for a peer that accepts nothing for `stall_s`."""
    rest = memoryview(data)
    while rest:
        count = channel.send([rest])
        rest = rest[count:]
        if rest:
            channel.wait_writable(stall_s)
    flush(channel, stall_s=stall_s)


def flush(channel: ByteChannel, *, stall_s: float) -> None:
    """Pass everything on to the kernel. Raises as `send_exactly` does."""
    while not channel.flush():
        channel.wait_writable(stall_s)
