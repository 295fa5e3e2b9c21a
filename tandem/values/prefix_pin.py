"""Pins: a tenant's requests to keep the blocks of a prefix in a worker's cache until a time. Values only."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tandem.values.ids import BlockHash

MAX_PIN_NAME_CHARS = 256
MAX_PIN_S = 7 * 86_400.0
"""Longest lifetime of a pin without renewal."""


class PinKey(NamedTuple):
    """Identifies a pin; names of different tenants cannot collide."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """Keep the blocks from the chain's root to `last_block` until `ttl_s` from now; the same key again renews."""

    key: PinKey
    last_block: BlockHash
    ttl_s: float


class PinOutcome(Enum):
    """The outcome of a pin at a worker."""

    HELD = "held"
    """The prefix is in the worker's pool and stays there; see `PinResult.num_tokens`."""
    NOT_HERE = "not_here"
    """The prefix is not in the worker's pool."""
    NO_ROOM = "no_room"
    """The pin would exceed the limit of all pins or of the tenant's, or take blocks that are reserved."""
    GAVE_WAY = "gave_way"
    """The pin was released: a later pin of the same tenant needed the room, or a request could not run otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinResult:
    """A worker's report on one pin."""

    key: PinKey
    outcome: PinOutcome
    num_tokens: int = 0
    """Length of the prefix that the pin keeps for use; 0 while the window at its end is missing, where windowed layers
    are kept apart."""


class PinTotals(NamedTuple):
    """A worker's pins: current gauges, and counts since its start."""

    num_pins: int = 0
    num_blocks: int = 0
    """Distinct blocks that are kept because of pins."""
    max_blocks: int = 0
    made: int = 0
    renewed: int = 0
    refused: int = 0
    gave_way: int = 0
    expired: int = 0


NO_PINS = PinTotals()
