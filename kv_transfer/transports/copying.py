"""Copying cells between two mapped regions, in pieces small enough to be stopped."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import KVRegion
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.ids import BlockId

PIECE_BYTES = 1 << 20
"""Bounds how long a cancel or a revocation waits; large enough to copy at full rate, and cache-hot for its CRC."""

Bytes = npt.NDArray[np.uint8]


class RegionCopier:
    """Copies from one region to another of the same shape per block."""

    def __init__(self, source: KVRegion, target: KVRegion) -> None:
        if source.layer_block_bytes != target.layer_block_bytes or source.num_layers != target.num_layers:
            raise TransferError("the two KV regions have different block shapes")
        self._source, self._target = source, target
        self._from: Bytes = np.frombuffer(source.buffer, dtype=np.uint8)
        self._to: Bytes = np.frombuffer(target.buffer, dtype=np.uint8)

    def copy(
        self, job: WriteJob, slots: Sequence[BlockId], may_move: Callable[[], AbstractContextManager[None]]
    ) -> tuple[int, int]:
        """Copy a job's cells into `slots` (of those cells, in order). Returns (checksum, bytes).

        Each piece is moved inside a fresh `may_move()`, which raises TransferError to stop.
        """
        cells = job.order.cells
        checksum = total = 0
        reads = _pieces(list(self._source.spans(cells, job.order.sources)))
        writes = list(self._target.spans(cells, slots))
        for here, there, size in _pair(reads, writes):
            with may_move():
                # numpy lets go of the GIL while it copies; slices of memoryviews would not.
                np.copyto(self._to[there : there + size], self._from[here : here + size])
                checksum = crc32(self._source.buffer[here : here + size], checksum)
            total += size
        return checksum, total


def _pieces(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        (offset + done, min(PIECE_BYTES, length - done))
        for offset, length in spans
        for done in range(0, length, PIECE_BYTES)
    ]


def _pair(reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source offset, target offset, size) of pieces that are contiguous on both sides; equal total lengths."""
    result = []
    remaining = iter(writes)
    there, room = 0, 0
    for start, length in reads:
        here, left = start, length
        while left:
            if not room:
                there, room = next(remaining)
            size = min(left, room)
            result.append((here, there, size))
            here, left, there, room = here + size, left - size, there + size, room - size
    return result
