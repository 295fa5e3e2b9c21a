"""Which KV cells of a hand-off: what chunks, messages and transports name instead of addresses. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRange:
    """A box of KV cells of a hand-off: the model's layers x units of tokens x the model's KV heads.

    A unit is as many tokens as the smaller block of the two workers has. Units are counted from the end of the held
    prefix: indices in the reservation, never addresses.
    """

    first_layer: int
    num_layers: int
    first_unit: int
    num_units: int
    first_head: int
    num_heads: int
