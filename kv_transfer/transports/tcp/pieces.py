"""A payload on its way through a channel: in pieces that one system call moves and one checksum call finds hot."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kv_transfer.memory import checksum
from kv_transfer.memory.socket_stream import StreamProgress

MAX_VIEWS = 1024
"""Most buffers that the kernel takes in one call (IOV_MAX)."""

Piece = list[memoryview]


def pieces(views: Iterable[memoryview], piece_bytes: int) -> Iterator[Piece]:
    """The same bytes in order, in groups of at most `piece_bytes` and MAX_VIEWS views."""
    piece: Piece = []
    room = piece_bytes
    for whole in views:
        view, size = whole, len(whole)
        while size > room:
            piece.append(view[:room])
            yield piece
            view, size = view[room:], size - room
            piece, room = [], piece_bytes
        piece.append(view)
        room -= size
        if not room or len(piece) == MAX_VIEWS:
            yield piece
            piece, room = [], piece_bytes
    if piece:
        yield piece


def drop_moved(piece: Piece, count: int, value: int) -> int:
    """Drop the first `count` bytes, which have just been moved; returns their CRC-32, going on from `value`."""
    crc32 = checksum.crc32
    if count == sum(map(len, piece)):
        for view in piece:
            value = crc32(view, value)
        piece.clear()
        return value
    left, num_whole = count, 0
    for view in piece:
        size = len(view)
        if left < size:
            break
        value = crc32(view, value)
        left -= size
        num_whole += 1
    if left:
        view = piece[num_whole]
        value = crc32(view[:left], value)
        piece[num_whole] = view[left:]
    del piece[:num_whole]
    return value


class StreamPart(Protocol):
    """A payload, or a part of one, that goes out or comes in. One thread; under the lock that keeps its bytes."""

    @property
    def num_bytes(self) -> int:
        """Of all of it."""

    @property
    def num_moved(self) -> int:
        """Bytes that have gone through."""

    @property
    def checksum(self) -> int:
        """CRC-32 of these, behind what was before."""

    def advance(self) -> StreamProgress:
        """Move some, without waiting. Raises OSError."""


class ViewsPart:
    """A Parcel of this process's memory, one call at a time."""

    __slots__ = ("_at_zero", "_move", "_piece", "_pieces", "checksum", "num_bytes", "num_moved")

    def __init__(
        self,
        views: list[memoryview],
        move: Callable[[Piece], int | None],
        *,
        piece_bytes: int,
        at_zero: StreamProgress,
        value: int = 0,
    ) -> None:
        """`move` is a channel's `send` or `receive`; `at_zero` is what 0 means to it."""
        self._pieces = pieces(views, piece_bytes)
        self._piece: Piece = []
        self._move = move
        self._at_zero = at_zero
        self.num_bytes = sum(map(len, views))
        self.num_moved = 0
        self.checksum = value

    def advance(self) -> StreamProgress:
        if not self._piece:
            self._piece = next(self._pieces, [])
        if not self._piece:
            return StreamProgress.DONE
        count = self._move(self._piece)
        if count is None:
            return StreamProgress.BLOCKED
        if not count:
            return self._at_zero
        self.checksum = drop_moved(self._piece, count, self.checksum)
        self.num_moved += count
        if self.num_moved == self.num_bytes:
            return StreamProgress.DONE
        return StreamProgress.BLOCKED if self._piece else StreamProgress.PAUSED
