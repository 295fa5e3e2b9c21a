"""A pin: a tenant's wish that the blocks of one prefix stay in a worker's cache for a while. Values only."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tandem.values.ids import BlockHash

MAX_PIN_NAME_CHARS = 256
MAX_PIN_S = 7 * 86_400.0
"""Longest life of a pin that nobody renews."""


class PinKey(NamedTuple):
    """Which pin; a tenant's own names cannot meet another tenant's."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """Keep the blocks from the chain's root to `last_block` until `ttl_s` from now; the same key again renews."""

    key: PinKey
    last_block: BlockHash
    ttl_s: float


class PinOutcome(Enum):
    """What a worker says of a pin."""

    HELD = "held"
    NOT_HERE = "not_here"
    """The prefix is not in its pool."""
    NO_ROOM = "no_room"
    """It would exceed what pins, or this tenant's, may hold, or take blocks that are promised."""
    GAVE_WAY = "gave_way"
    """It was held: a later pin of the same tenant took its room, or a request could not have run beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinTold:
    """A worker's word on one pin."""

    key: PinKey
    outcome: PinOutcome
    num_tokens: int = 0
    """Held."""


class PinTotals(NamedTuple):
    """A worker's pins: gauges of now, and counts since its start."""

    num_pins: int = 0
    num_blocks: int = 0
    """Distinct blocks that stay because of them."""
    max_blocks: int = 0
    made: int = 0
    renewed: int = 0
    refused: int = 0
    gave_way: int = 0
    expired: int = 0


NO_PINS = PinTotals()
