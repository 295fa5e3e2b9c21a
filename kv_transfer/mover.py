"""Moving and checksumming chunks in one pass by compiled code (csrc/), chosen when it can be built here.

A chunk is named by its layers and units: compiled code finds its runs itself, so a chunk costs Python a few
microseconds however many runs it has. The sources need no more of a processor than the compiler does; the instructions
that are used are chosen when they run.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from pathlib import Path

from kv_transfer.lane_table import LaneTable, Place
from kv_transfer.messages import CellRange
from kv_transfer.placed import PlacedCells
from kv_transfer.region import KVRegion
from tandem.errors import InvariantError, TransferError
from tandem.native.build import NativeUnavailable, Recipe, build
from tandem.native.library import NativeLibrary

RECIPE = Recipe(
    name="movers",
    sources=Path(__file__).parent / "csrc",
    flags=("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
)
PIECE_BYTES = 1 << 20
"""Bounds how long whoever wants a lock waits for it."""
# csrc/mover.cpp
_DONE, _PAUSED, _OUTSIDE = 1, 0, -1

log = logging.getLogger(__name__)

MayMove = Callable[[], AbstractContextManager[None]]
"""Entered while bytes are moved; raises TransferError to stop."""


class Level(IntEnum):
    """Instructions of csrc/kernels.h."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


class PlacedBytes:
    """Cells of one prompt in this process's memory. Not for cells that a converter stands between."""

    __slots__ = ("_base", "_cells", "_head_tables", "_place", "_region", "_table", "_unit_offset")

    def __init__(self, region: KVRegion, cells: PlacedCells, *, is_source: bool) -> None:
        """Raises TransferError when the hand-off does not begin with a unit."""
        mapping = cells.mapping
        self._region = region  # must outlive the place
        self._base = region.address
        self._cells = cells
        self._head_tables = mapping.source_table if is_source else mapping.destination_table
        first_unit, rest = divmod(cells.held_tokens, mapping.unit)
        if rest:
            raise TransferError("a hand-off begins within a unit")
        self._table = self._head_tables(0, mapping.num_heads)
        self._unit_offset = first_unit - cells.at.first_block * self._table.units_per_block
        self._place = self._at(self._table)

    def seek(self, cells: CellRange) -> tuple[Place, int]:
        """Where to begin with these cells. Raises TransferError when they are not the model's."""
        mapping = self._cells.mapping
        if not (cells.num_layers > 0 and 0 <= cells.first_layer <= mapping.num_layers - cells.num_layers):
            raise TransferError("cells outside the model")
        place = self._place
        if cells.num_heads != mapping.num_heads:
            place = self._at(self._head_tables(cells.first_head, cells.num_heads))
        elif cells.first_head:
            raise TransferError("cells outside the model")
        return place, self._unit_offset + cells.first_unit

    def _at(self, table: LaneTable) -> Place:
        at = self._cells.at
        return Place(table, self._base, at.pool_blocks, at.blocks)


class Mover:
    """The compiled functions; any thread may use them, and none of them holds the GIL."""

    def __init__(self, library: NativeLibrary, level: Level | None = None) -> None:
        """With the best instructions that the processor has, unless told which."""
        best = Level(library.bind("tandem_mover_level", "", "i")())
        self.level = best if level is None else min(level, best)
        self._move = library.bind("tandem_move", "ipipiiiiippip", "i")
        self._checksum = library.bind("tandem_checksum", "ipiiii", "i")
        self._runs = library.bind("tandem_runs", "piiiipi", "i")
        self._crc32 = library.bind("tandem_crc32", "ipii", "i")

    def move(
        self,
        source: PlacedBytes,
        target: PlacedBytes,
        cells: CellRange,
        may_move: MayMove,
        wanted: tuple[int | None, int | None] = (None, None),
        *,
        with_checksum: bool = True,
    ) -> tuple[int, int]:
        """Copy `cells`; returns (their checksum, bytes).

        `may_move` is entered for one piece or more: as soon as one of the flags at `wanted` is set, the piece under way
        is the last one before it is left and entered again. Raises TransferError for cells that are not there.
        """
        here, here_unit = source.seek(cells)
        there, there_unit = target.seek(cells)
        progress = (ctypes.c_int64 * 2)()
        result = _PAUSED
        while result == _PAUSED:
            with may_move():
                result = self._move(
                    self.level,
                    here.address,
                    here_unit,
                    there.address,
                    there_unit,
                    cells.first_layer,
                    cells.num_layers,
                    cells.num_units,
                    PIECE_BYTES,
                    *wanted,
                    with_checksum,
                    progress,
                )
        if result != _DONE:
            raise _refusal(result)
        return progress[1], progress[0]

    def checksum(self, place: PlacedBytes, cells: CellRange) -> int:
        """Of `cells` where they lie. Raises TransferError for cells that are not there."""
        at, unit = place.seek(cells)
        result: int = self._checksum(self.level, at.address, unit, cells.first_layer, cells.num_layers, cells.num_units)
        if result < 0:
            raise _refusal(result)
        return result

    def runs(self, place: PlacedBytes, cells: CellRange) -> list[tuple[int, int]]:
        """(offset, length) in the order of the wire; no run continues the one before it. Raises TransferError."""
        at, unit = place.seek(cells)
        box = (cells.first_layer, cells.num_layers, cells.num_units)
        count: int = self._runs(at.address, unit, *box, None, 0)
        if count < 0:
            raise _refusal(count)
        found = (ctypes.c_int64 * (2 * count))()
        self._runs(at.address, unit, *box, found, count)
        return list(zip(found[::2], found[1::2], strict=True))

    def crc32(self, address: int, num_bytes: int, value: int = 0) -> int:
        """As zlib's."""
        result: int = self._crc32(self.level, address, num_bytes, value)
        return result


@functools.cache
def load_mover() -> Mover | None:
    """This process's, built the first time (seconds); None, and a line in the log, where none can be built."""
    try:
        return Mover(NativeLibrary(build(RECIPE)))
    except NativeUnavailable as unavailable:
        log.warning("KV chunks are moved by numpy, at a third of the rate: %s", unavailable)
        return None


def _refusal(result: int) -> Exception:
    if result == _OUTSIDE:
        return TransferError("cells outside the blocks of their prompt, or blocks outside the KV region")
    return InvariantError("source and destination of a chunk differ in size")
