"""The cells of one hand-off in one worker's pool: from indices in the reservation to bytes. Pure."""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import KVSlice, TokenBlocks
from kv_transfer.layout.mapping import CellMapping, Payload
from kv_transfer.layout.runs import Copies, Runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedCells:
    """Some of a hand-off's blocks, on either side. Methods raise TransferError for cells that they do not hold."""

    mapping: CellMapping
    held_tokens: int
    """Where the hand-off's cells begin."""
    at: TokenBlocks

    def box(self, cells: CellRange) -> KVSlice:
        """What the cells mean to the model."""
        unit = self.mapping.unit
        return KVSlice(
            first_layer=cells.first_layer,
            num_layers=cells.num_layers,
            first_token=self.held_tokens + cells.first_unit * unit,
            num_tokens=cells.num_units * unit,
            first_head=cells.first_head,
            num_heads=cells.num_heads,
        )

    def payload(self, cells: CellRange) -> Payload:
        return self.mapping.payload(self.box(cells))

    def reads(self, cells: CellRange) -> Runs:
        """Where the cells lie at the source."""
        return self.mapping.reads(self.box(cells), self.at)

    def writes(self, cells: CellRange) -> Runs:
        """Where the cells land at the destination."""
        return self.mapping.writes(self.box(cells), self.at)

    def copies_to(self, destination: "PlacedCells", cells: CellRange) -> Copies:
        """From the source to the destination, for whoever sees both pools."""
        return self.mapping.copies(self.box(cells), self.at, destination.at)

    def fan_out(self, cells: CellRange) -> Copies:
        """Copies within the destination, to the other ranks that hold what has landed."""
        return self.mapping.fan_out(self.box(cells), self.at)
