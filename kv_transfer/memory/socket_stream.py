"""Moves chunks between a pool and a socket with compiled code (csrc/stream.cpp), without Python work per run."""

import os
from array import array
from collections.abc import Callable
from enum import IntEnum

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.write_stop_lock import BurstLock
from tandem.errors import TransferError
from tandem.native.library import NativeLibrary

BURST_BYTES = 256 << 10
"""Bytes per system call: few enough to be in a second-level cache when they are checksummed."""


class StreamStep(IntEnum):
    """Result of one step of a stream."""

    PAUSED = 0
    """There is more to do; another thread may be waiting for the lock."""
    DONE = 1
    BLOCKED = 2
    """Nothing has come yet, or there is no room yet."""
    ENDED = 3
    """The peer has ended."""


class CellStream:
    """One chunk being sent or received. `advance` does not wait; one thread, under `lock`."""

    __slots__ = ("_advance", "_blocks", "_numbers", "address", "num_bytes")

    def __init__(self, numbers: "array[int]", blocks: object, advance: Callable[[int], int], num_bytes: int) -> None:
        self._numbers = numbers
        self._blocks = blocks  # kept alive: compiled code holds its address
        self._advance = advance
        self.address = numbers.buffer_info()[0]
        self.num_bytes = num_bytes
        """Payload of the whole chunk."""

    @property
    def num_moved(self) -> int:
        """Number of bytes moved so far."""
        return self._numbers[-3]

    @property
    def checksum(self) -> int:
        return self._numbers[-2]

    def advance(self) -> StreamStep:
        """Move as many bytes as possible now. Raises OSError."""
        result = self._advance(self.address)
        if result < 0:
            error = self._numbers[-1]
            raise OSError(error, os.strerror(error))
        return StreamStep(result)


class CellStreams:
    """Opens streams, from any thread."""

    def __init__(self, library: NativeLibrary, level: int) -> None:
        self._level = level
        self._open = library.bind("tandem_stream_open", "p", "i")
        self._advance = library.bind("tandem_stream_advance", "p", "i")

    def open(
        self,
        addresses: CellAddresses,
        cells: CellRange,
        socket: int,
        lock: BurstLock,
        *,
        is_sending: bool,
        with_checksum: bool = True,
    ) -> CellStream:
        """Open a stream of `cells` through a connected socket. Raises TransferError for cells not held."""
        blocks, unit = addresses.seek(cells)
        # csrc/stream.cpp: Stream
        counts = (cells.first_layer, cells.num_layers, cells.num_units)
        given = (self._level, socket, is_sending, blocks.address, unit, *counts, BURST_BYTES, lock.wanted, 0)
        numbers = array("q", (*given, with_checksum, 0, 0, 0, 0))
        num_bytes: int = self._open(numbers.buffer_info()[0])
        if num_bytes < 0:
            raise TransferError("cells outside the blocks of their prompt, or blocks outside the KV region")
        return CellStream(numbers, blocks, self._advance, num_bytes)
