"""The names of KV cells that chunks, messages and transports use instead of addresses. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRange:
    """A box of cells of a hand-off: consecutive layers, units of tokens and KV heads.

    Heads are numbered as in the model, and so are layers unless windowed ones are kept apart: then by
    `KVLayout.layer_order`, and a box has layers of one group. Units are counted from the end of the held prefix:
    indices in the reservation, never addresses.
    """

    first_layer: int
    num_layers: int
    first_unit: int
    num_units: int
    first_head: int
    num_heads: int
