"""The cells of one hand-off in one worker's pool: maps indices in the reservation to bytes. Pure."""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import TokenBlocks
from kv_transfer.layout.mapping import CellMapping, Payload
from kv_transfer.layout.runs import RunPairs, Runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedCells:
    """Some blocks of a hand-off, on either side. Methods raise TransferError for cells that these do not hold."""

    mapping: CellMapping
    at: TokenBlocks

    def payload(self, cells: CellRange) -> Payload:
        return self.mapping.payload(cells)

    def reads(self, cells: CellRange) -> Runs:
        """Runs that hold the cells at the source."""
        return self.mapping.reads(cells, self.at)

    def writes(self, cells: CellRange) -> Runs:
        """Runs in which the cells land at the destination."""
        return self.mapping.writes(cells, self.at)

    def run_pairs_to(self, destination: "PlacedCells", cells: CellRange) -> RunPairs:
        """Pairs of runs from this source to a destination, for copies between two mapped pools."""
        return self.mapping.run_pairs(cells, self.at, destination.at)

    def fan_out(self, cells: CellRange) -> RunPairs:
        """Copies within the destination, to the other ranks that hold the landed cells."""
        return self.mapping.fan_out(cells, self.at)
