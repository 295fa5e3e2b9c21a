"""One side's layout as an array of numbers, for compiled code: csrc/walk.h reads it. Pure.

A table belongs to a pair of workers and is independent of prompts; `StridedBlocks` adds a prompt's blocks in one pool.
"""

from array import array
from collections.abc import Sequence

from kv_transfer.layout.runs import Run

_POOL_BLOCKS_BYTES = 5 * 8


class StridedLayoutTable:
    """One side of some heads: their planes as in `Runs`, and the runs of each range of heads in a block, by unit."""

    __slots__ = ("_arrays", "address", "units_per_block")

    def __init__(
        self,
        planes: Sequence[tuple[int, int]],
        unit_runs: Sequence[Sequence[Sequence[Run]]],
        *,
        num_layers: int,
        block_bytes: int,
    ) -> None:
        """`unit_runs`: `[range of heads, unit, run]`; all ranges have equally many units."""
        units = [unit for head_range in unit_runs for unit in head_range]
        starts = array("q", [0])
        for unit in units:
            starts.append(starts[-1] + len(unit))
        runs = array("q", [number for unit in units for run in unit for number in run])
        flat = array("q", [number for plane in planes for number in plane])
        self.units_per_block = len(unit_runs[0])
        # csrc/walk.h: LayoutTable
        addresses = [numbers.buffer_info()[0] for numbers in (flat, starts, runs)]
        planes_per_layer = len(planes) // num_layers
        table = array(
            "q", [addresses[0], planes_per_layer, addresses[1], addresses[2], self.units_per_block, block_bytes]
        )
        self._arrays = (flat, starts, runs, table)
        self.address = table.buffer_info()[0]


class StridedBlocks:
    """Blocks of one prompt in the pool at address `region`; compiled code refuses blocks outside the pool."""

    __slots__ = ("_numbers", "_table", "address")

    def __init__(self, table: StridedLayoutTable, region: int, pool_blocks: int, blocks: Sequence[int]) -> None:
        self._table = table
        # csrc/walk.h: PoolBlocks, and behind it the blocks that it points to
        self._numbers = numbers = array("q", (table.address, region, pool_blocks, 0, len(blocks), *blocks))
        self.address = numbers.buffer_info()[0]
        numbers[3] = self.address + _POOL_BLOCKS_BYTES
