"""Moving cells between two mapped pools, in pieces small enough to be stopped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from kv_transfer import placing
from kv_transfer.checksum import crc32
from kv_transfer.departure import Departure
from kv_transfer.pairing import Pairing
from kv_transfer.placed import PlacedCells
from kv_transfer.region import KVRegion
from kv_transfer.runs import Copy
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError

PIECE_BYTES = 1 << 20
"""Bounds how long a cancel or a revocation waits; large enough to copy at full rate, and cache-hot for its CRC."""

MayMove = Callable[[], AbstractContextManager[None]]
"""Entered around each piece; raises TransferError to stop."""


class RegionCopier:
    """Copies from a source's region into a destination's."""

    def __init__(self, source: KVRegion, target: KVRegion, pairing: Pairing) -> None:
        if pairing.wire_dtype != pairing.destination.dtype:
            raise TransferError("what is written into a peer's memory must be what it holds")
        self._source, self._to = source, target.array()
        self._departure = Departure(source, pairing)

    def copy(self, job: WriteJob, target: PlacedCells, may_move: MayMove) -> tuple[int, int]:
        """Copy a job's cells to where they lie in `target`. Returns (checksum, bytes)."""
        order = job.order
        if self._departure.converts:
            with may_move():
                payload = self._departure.convert(order.source, order.cells)
                placing.scatter(target.writes(order.cells), payload, self._to)
            return crc32(payload.data), payload.nbytes
        return self._copy(order.source.copies_to(target, order.cells), may_move)

    def _copy(self, copies: Iterable[Copy], may_move: MayMove) -> tuple[int, int]:
        checksum = total = 0
        buffer, here_bytes, there_bytes = self._source.buffer, self._source.array(), self._to
        for piece in pieces(copies):
            with may_move():
                for here, there, size in piece:
                    # numpy lets go of the GIL while it copies; slices of memoryviews would not.
                    np.copyto(there_bytes[there : there + size], here_bytes[here : here + size])
                    checksum = crc32(buffer[here : here + size], checksum)
                    total += size
        return checksum, total


def pieces(copies: Iterable[Copy], piece_bytes: int = PIECE_BYTES) -> Iterator[list[Copy]]:
    """The same copies in groups of at most `piece_bytes`."""
    piece: list[Copy] = []
    room = piece_bytes
    for start, target, length in copies:
        here, there, left = start, target, length
        while left:
            size = min(left, room)
            piece.append((here, there, size))
            here, there, left, room = here + size, there + size, left - size, room - size
            if not room:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece
