"""What admission knows of a request, what it answers, and its bounds."""

from dataclasses import dataclass, field
from typing import NamedTuple

from router.admission.cluster_capacity import CapacityPolicy
from router.admission.fair_queue import Ticket
from router.admission.rate_limits import RateLimitGrant
from tandem.errors import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """Bounds of what runs and what waits."""

    max_inflight: int = 1024
    """Requests that run at once; those beyond it wait."""
    background_share: float = 0.75
    """Of those: what requests of positive priority may fill."""
    max_requests: int = 512
    max_tokens: int = 4_000_000
    max_queue_s: float = 60.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    credit_s: float = 1.0
    """Of the whole cluster's work: how far a tenant that begins to wait may be behind the others."""
    credit_lapses_s: float = 5.0
    """Without a request: who comes back after that has no credit, like one who is new. Whether a few requests come
    then or a flood is not known, and those that were there have shown that they stay below their share."""
    entry_share: float = 0.8
    """Of the time to its deadline that a request may be predicted to need when it comes: predictions are no better than
    that, and whoever is let in should not be refused later."""
    patience: float = 4.0
    """Times `max_queue_s` that a request may be predicted to wait altogether once it was let in."""
    room: CapacityPolicy = field(default_factory=CapacityPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """The part of a request that admission decides by."""

    tenant: str
    priority: int
    num_tokens: int
    """Tokens of its prompt."""
    max_output_tokens: int
    """Tokens that its answer may have, over all choices."""
    deadline_s: float | None
    promised: bool = False
    """A stream that goes on: it is counted, and does not wait."""
    leaving: int = 0
    """Requests of its tenant that end when it begins."""


@dataclass(slots=True)
class QueuedTotals:
    """Some of those in line, summed."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class AdmissionEntry:
    ticket: Ticket
    grant: RateLimitGrant
    waiting: bool = False
    in_transit: bool = False
    had_turn: bool = False
    is_local: bool = False
    """It had its turn because a decode worker reads its prompt itself."""
    ended: bool = False
    output_tokens: int = 0
    cached_tokens: int | None = field(default=None)
    """Known when a choice has ended."""


class AdmissionResult(NamedTuple):
    """What became of one client call."""

    entries: list[AdmissionEntry]
    evicted: list[tuple[AdmissionEntry, ServingError]]
    """Others that had to make room, whether or not that sufficed."""
    refusal: ServingError | None = None
    """None of its entries lives then."""
