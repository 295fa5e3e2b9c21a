"""Lanes and shapes of one side as numbers in memory, for compiled code: csrc/walk.h reads them. Pure.

A table belongs to a pair of workers and knows no prompt; a place is a prompt's blocks in one pool, on top of a table.
"""

import ctypes
from array import array
from collections.abc import Sequence

from kv_transfer.runs import Run


class _Table(ctypes.Structure):
    """csrc/walk.h: LaneTable."""

    _fields_ = (
        ("lanes", ctypes.c_void_p),
        ("lanes_per_layer", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("units_per_block", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
    )


class _Place(ctypes.Structure):
    """csrc/walk.h: Place."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("region", ctypes.c_void_p),
        ("pool_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
    )


class LaneTable:
    """One side of a range of heads: lanes as in `Runs`, and each shape's runs in a block, by unit of tokens."""

    __slots__ = ("_arrays", "_table", "address", "units_per_block")

    def __init__(
        self,
        lanes: Sequence[tuple[int, int]],
        shapes: Sequence[Sequence[Sequence[Run]]],
        *,
        num_layers: int,
        block_bytes: int,
    ) -> None:
        """`shapes`: `[shape, unit, run]`; all have equally many units."""
        units = [unit for shape in shapes for unit in shape]
        starts = array("q", [0])
        for unit in units:
            starts.append(starts[-1] + len(unit))
        runs = array("q", [number for unit in units for run in unit for number in run])
        flat = array("q", [number for lane in lanes for number in lane])
        self._arrays = (flat, starts, runs)  # the table points into them
        self.units_per_block = len(shapes[0])
        self._table = _Table(
            lanes=flat.buffer_info()[0],
            lanes_per_layer=len(lanes) // num_layers,
            starts=starts.buffer_info()[0],
            runs=runs.buffer_info()[0],
            units_per_block=self.units_per_block,
            block_bytes=block_bytes,
        )
        self.address = ctypes.addressof(self._table)


class Place:
    """Blocks of one prompt in the pool that begins at `region`; compiled code refuses those that are not the pool's."""

    __slots__ = ("_blocks", "_place", "_table", "address")

    def __init__(self, table: LaneTable, region: int, pool_blocks: int, blocks: Sequence[int]) -> None:
        self._table = table
        self._blocks = array("q", blocks)
        address, count = self._blocks.buffer_info()
        self._place = _Place(table.address, region, pool_blocks, address, count)
        self.address = ctypes.addressof(self._place)
