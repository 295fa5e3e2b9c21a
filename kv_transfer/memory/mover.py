"""Copies and checksums chunks in one pass with compiled code (csrc/), where it can be built.

A chunk is named by its layers and units, and compiled code finds its runs, so a chunk costs Python a few microseconds
however many runs it has. The code is built for the processor family that the compiler targets; faster instructions are
chosen at run time.
"""

import ctypes
import functools
import logging
from array import array
from enum import IntEnum
from pathlib import Path

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.socket_stream import CellStreams
from kv_transfer.memory.write_stop_lock import BURST_BYTES, WriteStopLock
from tandem.errors import InvariantError, TransferError
from tandem.native.build import NativeUnavailable, Recipe, build
from tandem.native.library import NativeLibrary

RECIPE = Recipe(
    name="movers",
    sources=Path(__file__).parents[1] / "csrc",
    flags=("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
)
# csrc/pass.h
_PAUSED, _OUTSIDE = 0, -1

log = logging.getLogger(__name__)


class Level(IntEnum):
    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


class Mover:
    """The compiled functions; callable from any thread, without the GIL."""

    def __init__(self, library: NativeLibrary, level: Level | None = None) -> None:
        """Use the best instructions that the processor has, but none beyond `level`."""
        best = Level(library.bind("tandem_mover_level", "", "i")())
        self.level = int(best if level is None else min(level, best))
        self._move = library.bind("tandem_move", "p", "i")
        self._checksum = library.bind("tandem_checksum", "p", "i")
        self._runs = library.bind("tandem_runs", "piiiipi", "i")
        self._crc32 = library.bind("tandem_crc32", "ipii", "i")
        self.streams = CellStreams(library, self.level)
        """Moves chunks through sockets."""

    def move(
        self,
        source: CellAddresses,
        target: CellAddresses,
        cells: CellRange,
        gate: WriteStopLock,
        *,
        with_checksum: bool = True,
    ) -> tuple[int, int]:
        """Copy `cells`; returns (their checksum, number of bytes).

        The gate is entered for one burst or more: as soon as another thread waits for one of its locks, the gate is
        left after the current burst and entered again. Raises TransferError for cells not held, and as the gate does.
        """
        here, here_unit = source.seek(cells)
        there, there_unit = target.seek(cells)
        # csrc/mover.cpp: Move
        move = array(
            "q",
            (
                self.level,
                here.address,
                here_unit,
                there.address,
                there_unit,
                cells.first_layer,
                cells.num_layers,
                cells.num_units,
                BURST_BYTES,
                gate.wanted,
                gate.also_wanted,
                with_checksum,
                0,
                0,
            ),
        )
        address = move.buffer_info()[0]
        result = _PAUSED
        while result == _PAUSED:
            with gate:
                result = self._move(address)
        if result < 0:
            raise _refusal(result)
        return move[-1], move[-2]

    def checksum(self, addresses: CellAddresses, cells: CellRange) -> int:
        """CRC-32 of `cells` in place. Raises TransferError for cells not held."""
        blocks, unit = addresses.seek(cells)
        # csrc/mover.cpp: Sum
        numbers = array("q", (self.level, blocks.address, unit, cells.first_layer, cells.num_layers, cells.num_units))
        result: int = self._checksum(numbers.buffer_info()[0])
        if result < 0:
            raise _refusal(result)
        return result

    def runs(self, addresses: CellAddresses, cells: CellRange) -> list[tuple[int, int]]:
        """Runs of `cells` as (offset, length) in the order of the wire, adjacent ones joined. Raises TransferError."""
        blocks, unit = addresses.seek(cells)
        counts = (cells.first_layer, cells.num_layers, cells.num_units)
        count: int = self._runs(blocks.address, unit, *counts, None, 0)
        if count < 0:
            raise _refusal(count)
        found = (ctypes.c_int64 * (2 * count))()
        self._runs(blocks.address, unit, *counts, found, count)
        return list(zip(found[::2], found[1::2], strict=True))

    def crc32(self, address: int, num_bytes: int, value: int = 0) -> int:
        result: int = self._crc32(self.level, address, num_bytes, value)
        return result


@functools.cache
def load_mover() -> Mover | None:
    """This process's mover, built by the first call (seconds); None, with a warning in the log, when it cannot be
    built."""
    try:
        return Mover(NativeLibrary(build(RECIPE)))
    except NativeUnavailable as unavailable:
        log.warning("KV chunks are moved by numpy, at half the rate or less: %s", unavailable)
        return None


def _refusal(result: int) -> Exception:
    if result == _OUTSIDE:
        return TransferError("cells outside the blocks of their prompt, or blocks outside the KV region")
    return InvariantError("source and destination of a chunk differ in size")
