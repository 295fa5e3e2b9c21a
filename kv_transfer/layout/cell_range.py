"""Which KV cells of a hand-off: what chunks, messages and transports name instead of addresses. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRange:
    """Some cells of a hand-off: consecutive layers x units of tokens x KV heads, all of the model's numbering.

    Units are counted from the end of the held prefix: indices in the reservation, never addresses.
    """

    first_layer: int
    num_layers: int
    first_unit: int
    num_units: int
    first_head: int
    num_heads: int
