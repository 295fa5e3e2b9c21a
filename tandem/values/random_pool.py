"""Unguessable numbers and names, drawn from the operating system many at a time: a system call for each costs more than
all else that a router does to name a request."""

import os

_DRAWN_BYTES = 4096


class RandomPool:
    """Bytes of `os.urandom`, each used once. For one thread of one process: a forked child would draw the same."""

    def __init__(self) -> None:
        self._left = b""
        self._at = 0

    def token_hex(self, num_bytes: int) -> str:
        """Return the hexadecimal form of so many random bytes, like `secrets.token_hex`."""
        return self._take(num_bytes).hex()

    def randbits(self, num_bits: int) -> int:
        """Return a random number of so many bits, like `secrets.randbits`."""
        num_bytes = (num_bits + 7) // 8
        return int.from_bytes(self._take(num_bytes), "little") >> (8 * num_bytes - num_bits)

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._left):
            self._left, self._at, end = os.urandom(max(_DRAWN_BYTES, num_bytes)), 0, num_bytes
        found, self._at = self._left[self._at : end], end
        return found


RANDOM = RandomPool()
"""The pool of the event loop's thread. Router processes are started, never forked."""
