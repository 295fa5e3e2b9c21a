"""The addresses of one prompt's cells in this process's memory, for compiled code."""

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.strided_table import StridedBlocks, StridedLayoutTable
from kv_transfer.memory.region import KVRegion
from tandem.errors import TransferError


class CellAddresses:
    """Cells of one prompt in this process's memory; only for cells that are not converted."""

    __slots__ = ("_blocks", "_cells", "_first_unit", "_is_source", "_lane", "_region")

    def __init__(self, region: KVRegion, cells: PlacedCells, *, is_source: bool) -> None:
        """Raises TransferError when the held prefix does not end with a unit."""
        mapping = cells.mapping
        self._region = region  # kept alive: the block table holds its address
        self._cells = cells
        self._is_source = is_source
        self._lane = lane = mapping.lane
        self._first_unit = (mapping.source_unit if is_source else mapping.destination_unit)(cells.at)
        table = self._table(lane.first_head, lane.num_heads)
        self._blocks = StridedBlocks(table, region.address, cells.at.pool_blocks, cells.at.blocks)

    def seek(self, cells: CellRange) -> tuple[StridedBlocks, int]:
        """The block table and first unit of these cells. Raises TransferError when they are not the lane's."""
        lane = self._lane
        if not (
            cells.num_layers > 0 and 0 <= cells.first_layer - lane.first_layer <= lane.num_layers - cells.num_layers
        ):
            raise TransferError("cells outside the model")
        blocks = self._blocks
        if cells.num_heads != lane.num_heads or cells.first_head != lane.first_head:
            at = self._cells.at
            table = self._table(cells.first_head, cells.num_heads)
            blocks = StridedBlocks(table, self._region.address, at.pool_blocks, at.blocks)
        return blocks, self._first_unit + cells.first_unit

    def _table(self, first_head: int, num_heads: int) -> StridedLayoutTable:
        mapping = self._cells.mapping
        return (mapping.source_table if self._is_source else mapping.destination_table)(first_head, num_heads)
