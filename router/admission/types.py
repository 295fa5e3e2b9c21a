"""Requests as admission sees them, its results, and its bounds."""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from router.admission.cluster_capacity import CapacityPolicy
from router.admission.fair_queue import Ticket
from router.admission.rate_limits import RateLimitGrant
from tandem.errors import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """Bounds on running and waiting requests."""

    max_inflight: int = 1024
    """Requests that run at once; those beyond it wait."""
    background_share: float = 0.75
    """Share of those that requests of positive priority may fill."""
    max_requests: int = 512
    max_tokens: int = 4_000_000
    max_queue_s: float = 60.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    credit_s: float = 1.0
    """Maximum lag of a tenant that begins to wait behind the others, in seconds of the whole cluster's work."""
    credit_lapses_s: float = 5.0
    """Seconds without a request after which a tenant's credit lapses, as if it were new. Whether it then returns with a
    few requests or a flood is unknown, while the tenants that stayed have shown that they keep below their share."""
    entry_share: float = 0.8
    """Share of the time to its deadline that a request may be predicted to need on arrival: predictions are no more
    accurate than that, and an admitted request should not be refused later."""
    patience: float = 4.0
    """Multiple of `max_queue_s` that an admitted request may be predicted to wait altogether."""
    room: CapacityPolicy = field(default_factory=CapacityPolicy)


class AdmissionRequest(Struct, frozen=True, kw_only=True):
    """The part of a request that admission decides by."""

    tenant: str
    priority: int
    num_tokens: int
    """Length of its prompt."""
    max_output_tokens: int
    """Tokens that its answer may have, over all choices."""
    deadline_s: float | None
    promised: bool = False
    """Whether it continues a stream: it is counted, and does not wait."""
    leaving: int = 0
    """Requests of its tenant that end when it begins."""


class RefusedMemory(NamedTuple):
    """KV memory that choices wait for which had their turn and that every decode worker was too full for."""

    least_tokens: float
    """Of the smallest."""
    total_tokens: float


@dataclass(slots=True)
class QueuedTotals:
    """Totals over some of the queued requests."""

    num_requests: int = 0
    num_tokens: int = 0


class AdmissionEntry(Struct, kw_only=True, eq=False):
    ticket: Ticket
    grant: RateLimitGrant
    waiting: bool = False
    is_local: bool = False
    """Whether it had its turn because a decode worker prefills its prompt itself."""
    ended: bool = False
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Set when a choice has ended."""


class AdmissionResult(Struct, frozen=True):
    """The outcome of one client call."""

    entries: list[AdmissionEntry]
    evicted: list[tuple[AdmissionEntry, ServingError]]
    """Other requests evicted to make room, whether or not that sufficed."""
    refusal: ServingError | None = None
    """The error with which the call was refused; none of its entries is live then."""
