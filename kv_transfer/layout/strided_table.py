"""Lanes and shapes of one side as numbers in memory, for compiled code: csrc/walk.h reads them. Pure.

A table belongs to a pair of workers and knows no prompt; a place is a prompt's blocks in one pool, on top of a table.
"""

from array import array
from collections.abc import Sequence

from kv_transfer.layout.runs import Run

_PLACE_BYTES = 5 * 8


class StridedLayoutTable:
    """One side of a range of heads: lanes as in `Runs`, and each shape's runs in a block, by unit of tokens."""

    __slots__ = ("_arrays", "address", "units_per_block")

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
        self.units_per_block = len(shapes[0])
        # csrc/walk.h: LaneTable
        addresses = [numbers.buffer_info()[0] for numbers in (flat, starts, runs)]
        lanes_per_layer = len(lanes) // num_layers
        table = array(
            "q", [addresses[0], lanes_per_layer, addresses[1], addresses[2], self.units_per_block, block_bytes]
        )
        self._arrays = (flat, starts, runs, table)
        self.address = table.buffer_info()[0]


class StridedBlocks:
    """Blocks of one prompt in the pool that begins at `region`; compiled code refuses those that are not the pool's."""

    __slots__ = ("_numbers", "_table", "address")

    def __init__(self, table: StridedLayoutTable, region: int, pool_blocks: int, blocks: Sequence[int]) -> None:
        self._table = table
        # csrc/walk.h: Place, and behind it the blocks that it points to
        self._numbers = numbers = array("q", (table.address, region, pool_blocks, 0, len(blocks), *blocks))
        self.address = numbers.buffer_info()[0]
        numbers[3] = self.address + _PLACE_BYTES
