"""What frames travel through: a socket that is never waited for inside a call. Plain here, in TLS in tls.py.

A channel is read on one thread and written on one thread, which may be two. `hang_up` may come from any.
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
    """A stream of bytes both ways. Every method may raise OSError."""

    @property
    def descriptor(self) -> int | None:
        """Of a socket through which payload can go as it is, by compiled code; None when it cannot."""

    def first_byte(self, timeout_s: float) -> int | None:
        """What the peer begins with, which stays to be read; None when it has ended. Raises TransferError if late."""

    def send_in_the_clear(self, data: bytes) -> None:
        """Send a few unencrypted bytes before anything else, to a peer that speaks another protocol than expected."""

    @property
    def burst_bytes(self) -> int:
        """How much to ask for at once: bounds the time in one call."""

    def receive(self, burst: Burst) -> int | None:
        """Fill the front of `burst` with what has come: how much, 0 at the end, None when nothing is there yet."""

    def send(self, burst: Burst) -> int:
        """Take bytes from the front of `burst`, as many as there is room for; they are not read again."""

    def flush(self) -> bool:
        """Hand what `send` has taken to the kernel; False when there is no room for all of it yet."""

    def wait_readable(self, timeout_s: float | None) -> None:
        """After `receive` has had less than it could take. Raises TransferError when nothing comes in time."""

    def wait_writable(self, timeout_s: float | None) -> None:
        """After `send` or `flush` has left something. Raises TransferError when no room comes in time."""

    def hang_up(self) -> None:
        """Shut down both directions; wakes blocked calls. Never fails."""

    def close(self) -> None:
        """Give the descriptor back, once no thread uses the channel."""


class PlainChannel:
    """A connected TCP socket as a Channel. Owns it."""

    # What a second-level cache still has when it is checksummed; a larger one saves few calls.
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
        """See Channel; nothing stays here."""
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
    """A function that waits for an event of `mask`, for one thread; it raises TransferError when none comes in time."""
    poller = poll()
    poller.register(sock, mask)

    def wait(timeout_s: float | None) -> None:
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            raise TransferError("the peer stalled in the middle of a frame")

    return wait


def peek(sock: socket.socket) -> int | None:
    """The next byte of a socket that has one, whatever cipher may have to be put on it; None at the end."""
    seen = socket.socket.recv(sock, 1, socket.MSG_PEEK)
    return seen[0] if seen else None


def hang_up(sock: socket.socket) -> None:
    """End both directions of a socket on any thread."""
    with suppress(OSError):
        # Not SSLSocket's own method: that one forgets the cipher, and who reads next gets ciphertext.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def receive_exactly(channel: ByteChannel, size: int, *, within_s: float, patient: bool = False) -> bytes | None:
    """`size` bytes, or None when the peer ended before the first.

    All of them have to come within `within_s`: from now or, if `patient`, from the first one. Raises OSError, or
    TransferError for a peer that is too slow or ends in the middle.
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
    """All of `data`. Raises OSError, or TransferError for a peer that takes nothing for `stall_s`."""
    rest = memoryview(data)
    while rest:
        count = channel.send([rest])
        rest = rest[count:]
        if rest:
            channel.wait_writable(stall_s)
    flush(channel, stall_s=stall_s)


def flush(channel: ByteChannel, *, stall_s: float) -> None:
    """Hand everything to the kernel. Raises as `send_exactly` does."""
    while not channel.flush():
        channel.wait_writable(stall_s)
