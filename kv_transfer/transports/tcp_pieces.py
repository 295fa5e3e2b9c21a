"""A payload in pieces: what one system call is asked to move while a lock is held, and one checksum call finds hot."""

from collections.abc import Iterable, Iterator

from kv_transfer import checksum

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


def take(piece: Piece, count: int, value: int) -> int:
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
