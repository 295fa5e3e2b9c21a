"""Splits a payload into bursts, each small enough for one system call and for the cache when it is checksummed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kv_transfer.memory import checksum
from kv_transfer.memory.socket_stream import StreamStep

MAX_VIEWS = 1024
"""Maximum number of buffers that the kernel accepts in one call (IOV_MAX)."""

Burst = list[memoryview]


def bursts(views: Iterable[memoryview], burst_bytes: int) -> Iterator[Burst]:
    """Split the views into groups of at most `burst_bytes` and MAX_VIEWS views, in order."""
    burst: Burst = []
    room = burst_bytes
    for whole in views:
        view, size = whole, len(whole)
        while size > room:
            burst.append(view[:room])
            yield burst
            view, size = view[room:], size - room
            burst, room = [], burst_bytes
        burst.append(view)
        room -= size
        if not room or len(burst) == MAX_VIEWS:
            yield burst
            burst, room = [], burst_bytes
    if burst:
        yield burst


def drop_moved(burst: Burst, count: int, value: int) -> int:
    """Drop the first `count` bytes, which were just moved; returns the CRC-32 continued from `value` over them."""
    crc32 = checksum.crc32
    if count == sum(map(len, burst)):
        for view in burst:
            value = crc32(view, value)
        burst.clear()
        return value
    left, num_whole = count, 0
    for view in burst:
        size = len(view)
        if left < size:
            break
        value = crc32(view, value)
        left -= size
        num_whole += 1
    if left:
        view = burst[num_whole]
        value = crc32(view[:left], value)
        burst[num_whole] = view[left:]
    del burst[:num_whole]
    return value


class StreamPart(Protocol):
    """A payload, or part of one, being sent or received; one thread, under the lock that protects its memory."""

    @property
    def num_bytes(self) -> int:
        """Total number of bytes."""

    @property
    def num_moved(self) -> int:
        """Number of bytes moved so far."""

    @property
    def checksum(self) -> int:
        """CRC-32 of the bytes moved so far, continued from the parts before."""

    def advance(self) -> StreamStep:
        """Move some bytes without waiting. Raises OSError."""


class ViewsPart:
    """A StreamPart of this process's memory, moved with one call at a time."""

    __slots__ = ("_at_zero", "_burst", "_bursts", "_move", "checksum", "num_bytes", "num_moved")

    def __init__(
        self,
        views: list[memoryview],
        move: Callable[[Burst], int | None],
        *,
        burst_bytes: int,
        at_zero: StreamStep,
        value: int = 0,
    ) -> None:
        """`move` is a channel's `send` or `receive`; `at_zero` is the step that a result of 0 stands for."""
        self._bursts = bursts(views, burst_bytes)
        self._burst: Burst = []
        self._move = move
        self._at_zero = at_zero
        self.num_bytes = sum(map(len, views))
        self.num_moved = 0
        self.checksum = value

    def advance(self) -> StreamStep:
        if not self._burst:
            self._burst = next(self._bursts, [])
        if not self._burst:
            return StreamStep.DONE
        count = self._move(self._burst)
        if count is None:
            return StreamStep.BLOCKED
        if not count:
            return self._at_zero
        self.checksum = drop_moved(self._burst, count, self.checksum)
        self.num_moved += count
        if self.num_moved == self.num_bytes:
            return StreamStep.DONE
        return StreamStep.BLOCKED if self._burst else StreamStep.PAUSED
