"""The lock under which bytes are moved: held for long while nobody else wants it, given up within one piece."""

import ctypes
import threading
from types import TracebackType


class PieceLock:
    """A lock whose holder can see that it is wanted, and cannot take it again before whoever waited.

    A plain lock lets its holder release and take it again for as long as it likes; whoever waits then waits for all
    pieces of everything that is queued.
    """

    __slots__ = ("_door", "_lock", "_wanted", "wanted")

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._lock = threading.Lock()
        self._wanted = ctypes.c_int32()
        self.wanted = ctypes.addressof(self._wanted)
        """Where a 32-bit number is other than 0 while somebody waits."""

    def __enter__(self) -> None:
        # Whoever waits for the lock stands in the door, so its last holder comes after them.
        with self._door:
            if not self._lock.acquire(blocking=False):
                self._wanted.value = 1
                self._lock.acquire()
                self._wanted.value = 0

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._lock.release()
