"""Locks between the threads that move bytes and those that stop them, handed over within one burst."""

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

BURST_BYTES = 1 << 20
"""Bytes moved before checking whether another thread wants the lock; bounds how long a cancel or a revocation waits."""


class BurstLock:
    """A lock whose holder can see waiters, and cannot acquire it again before them.

    The holder of a plain lock may release and acquire it again indefinitely, so that a waiter waits for all queued
    bursts.
    """

    __slots__ = ("_entrance", "_lock", "_wanted", "release", "wanted")

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._lock = threading.Lock()
        self._wanted = ctypes.c_int32()
        self.wanted = ctypes.addressof(self._wanted)
        """Address of a 32-bit number that is not 0 while a thread waits."""
        self.release = self._lock.release

    def acquire(self) -> None:
        """Wait for the lock. A waiter holds the entrance, so the previous holder queues behind it."""
        with self._entrance:
            if not self._lock.acquire(False):
                self._wanted.value = 1
                self._lock.acquire()
                self._wanted.value = 0

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()


class WriteStopLock:
    """Context of a burst, or of several while no thread waits: takes one or two locks, then calls `check`.

    `check` raises TransferError when nothing may be moved any more; what it reads changes only under those locks.
    """

    __slots__ = ("_check", "_lock", "_other", "also_wanted", "wanted")

    def __init__(self, check: Callable[[], object], lock: BurstLock, other: BurstLock | None = None) -> None:
        self._check = check
        self._lock, self._other = lock, other
        self.wanted = lock.wanted
        self.also_wanted = 0 if other is None else other.wanted

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._other is not None:
            self._other.acquire()
        try:
            self._check()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_error: Any) -> None:
        if self._other is not None:
            self._other.release()
        self._lock.release()
