"""A socket with the bytes of an encrypted connection, for code that takes over a file descriptor, as asyncio does.

Python cannot give asyncio a connection whose TLS handshake is over. So a thread carries the bytes between it and one
end of a socket pair. That is for short messages: KV goes other ways.
"""

import select
import socket
import ssl
import threading
from contextlib import suppress

_MOST_BYTES = 1 << 16
"""Bytes read at a time, and only while none of the same direction wait to be sent."""


def decrypted(connection: ssl.SSLSocket) -> socket.socket:
    """Return a socket with the connection's bytes, which takes its place: the end of either is the end of both.

    What was not sent when the socket ended is lost. Raises OSError, RuntimeError without a descriptor or thread for it,
    and leaves the connection as it is.
    """
    near, far = socket.socketpair()
    carrier = _Carrier(connection, far)
    try:
        threading.Thread(target=carrier.run, name="tandem-decrypt", daemon=True).start()
    except RuntimeError:
        near.close()
        far.close()
        raise
    return near


class _Carrier:
    def __init__(self, connection: ssl.SSLSocket, plain: socket.socket) -> None:
        connection.setblocking(False)
        plain.setblocking(False)
        self._connection = connection
        self._plain = plain
        self._to_peer = b""
        self._to_plain = b""

    def run(self) -> None:
        """Carry bytes both ways until one end has ended."""
        try:
            with suppress(OSError):  # SSLError is one: either end is broken
                while self._carry() and self._wait():
                    pass
        finally:
            # First the plain end, so that whoever has the other does not wait for the connection's.
            self._plain.close()
            self._connection.close()

    def _carry(self) -> bool:
        """Move what can be moved now, until nothing can. Returns whether both ends are still open."""
        is_moving = True
        while is_moving:
            is_moving = False
            with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self._to_plain:
                    self._to_plain = self._connection.recv(_MOST_BYTES)
                    if not self._to_plain:
                        return False
                    is_moving = True
            with suppress(BlockingIOError):
                if self._to_plain:
                    self._to_plain = self._to_plain[self._plain.send(self._to_plain) :]
                    is_moving = True
            with suppress(BlockingIOError):
                if not self._to_peer:
                    self._to_peer = self._plain.recv(_MOST_BYTES)
                    if not self._to_peer:
                        return False
                    is_moving = True
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if self._to_peer:
                    self._to_peer = self._to_peer[self._connection.send(self._to_peer) :]
                    is_moving = True
        return True

    def _wait(self) -> bool:
        """Sleep until something may move: what is not read waits in the kernel. Returns False when the plain end has
        ended while bytes from it wait for a peer that does not read."""
        poll = select.poll()
        # A descriptor with nothing to wait for is left out: its end would wake this thread again and again.
        if of_connection := (0 if self._to_plain else select.POLLIN) | (select.POLLOUT if self._to_peer else 0):
            poll.register(self._connection, of_connection)
        poll.register(self._plain, (0 if self._to_peer else select.POLLIN) | (select.POLLOUT if self._to_plain else 0))
        ready = dict(poll.poll())
        has_ended = ready.get(self._plain.fileno(), 0) & (select.POLLHUP | select.POLLERR)
        return not (has_ended and self._to_peer)
