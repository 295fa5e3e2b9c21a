"""The terms that two workers agree on when they connect: how their cells correspond, and the wire dtype. Pure."""

from dataclasses import dataclass

from kv_transfer.layout.cells import TokenBlocks
from kv_transfer.layout.dtype_conversion import Converter, Floats
from kv_transfer.layout.mapping import CellMapping, vector_bytes
from kv_transfer.layout.placed_cells import PlacedCells
from tandem.errors import TransferError
from tandem.values.ids import BlockId
from tandem.values.kv_agreement import cannot_travel_as
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """Terms of one lane between a prefill worker (the source) and a decode worker (the destination)."""

    source: KVLayout
    destination: KVLayout
    wire_dtype: str
    mapping: CellMapping
    lane: int = 0
    head_scales: Floats | None = None
    """KV scales of the model, for fp8_e4m3: `[num_layers, 2, num_kv_heads]`, by the layers' order; 1 when absent."""

    @classmethod
    def from_layouts(
        cls,
        source: KVLayout,
        destination: KVLayout,
        *,
        wire_dtype: str,
        head_scales: Floats | None = None,
        lane: int = 0,
    ) -> "Pairing":
        """Raises TransferError, naming the field, for layouts and a dtype that do not agree."""
        if reason := cannot_travel_as(source.dtype, wire_dtype, destination.dtype):
            raise TransferError(reason)
        if head_scales is not None and source.windowed_layers:
            head_scales = head_scales[list(source.layer_order)]
        return cls(
            source=source,
            destination=destination,
            wire_dtype=wire_dtype,
            mapping=CellMapping(source, destination, lane=lane),
            lane=lane,
            head_scales=head_scales,
        )

    def at_source(
        self, held_tokens: int, first_block: int, blocks: tuple[BlockId, ...], pool_blocks: int
    ) -> PlacedCells:
        """Cells in some of a prompt's blocks at the source; `first_block` is the index of the first in the prompt."""
        at = TokenBlocks(blocks=blocks, first_block=first_block, held_tokens=held_tokens, pool_blocks=pool_blocks)
        return PlacedCells(mapping=self.mapping, at=at)

    def at_destination(self, held_tokens: int, blocks: tuple[BlockId, ...], pool_blocks: int) -> PlacedCells:
        """Cells in the blocks after the held prefix at the destination."""
        first_block = held_tokens // self.destination.block_size
        at = TokenBlocks(blocks=blocks, first_block=first_block, held_tokens=held_tokens, pool_blocks=pool_blocks)
        return PlacedCells(mapping=self.mapping, at=at)

    @property
    def unit_layer_bytes(self) -> int:
        """Bytes of one unit in one layer on the wire, K and V of all the lane's heads."""
        vectors = 2 * self.mapping.unit_tokens * self.mapping.lane.num_heads
        return vectors * vector_bytes(self.wire_dtype, self.source.head_dim)

    def at_departure(self) -> Converter | None:
        """The sender's conversion; None when its dtype is that of the wire."""
        return self._converter(self.source.dtype, self.wire_dtype)

    def at_arrival(self) -> Converter | None:
        """The receiver's conversion; None when its dtype is that of the wire."""
        return self._converter(self.wire_dtype, self.destination.dtype)

    def _converter(self, source: str, destination: str) -> Converter | None:
        if source == destination:
            return None
        return Converter(source, destination, head_scales=self.head_scales)


def choose_wire_dtype(source: KVLayout, destination: KVLayout, *, wish: str, one_sided: bool) -> str:
    """Choose the dtype of KV on the wire: the destination's if one-sided, otherwise `wish` if given.

    Without a wish, the smaller of the two dtypes: it costs no accuracy that would not be lost anyway.
    """
    if one_sided:
        return destination.dtype
    if wish:
        return wish
    return min(source.dtype, destination.dtype, key=lambda dtype: vector_bytes(dtype, source.head_dim))
