"""Counts of admission since the router's start, for metrics and tests. Pure."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum


class Rejection(Enum):
    """Reason why a request was refused; a metric label."""

    CONCURRENT = "concurrent_requests"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    QUEUE_FULL = "queue_full"
    QUEUE_TIME = "queue_time"
    """Predicted to wait longer than any request may."""
    DEADLINE = "deadline"
    """Predicted to miss its own deadline."""
    HOPELESS = "hopeless"
    """Predicted to miss its deadline or the longest wait, after it had waited."""
    DRAINING = "draining"


@dataclass(slots=True, kw_only=True)
class TenantCounts:
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    rejected: int = 0


@dataclass(slots=True)
class AdmissionCounts:
    """Counts over all tenants. Their number is bounded by the configured keys."""

    rejections: Counter[Rejection] = field(default_factory=Counter)
    tenants: defaultdict[str, TenantCounts] = field(default_factory=lambda: defaultdict(TenantCounts))
    num_turns: int = 0
    waited_s: float = 0.0
    """Seconds waited by all requests that had their turn, summed."""
    _last: tuple[Rejection, str] | None = None
    """The last refusal's reason and tenant."""

    def rejected(self, why: Rejection, tenant: str, num_requests: int = 1) -> None:
        """Count refused requests: a call is refused with all its requests."""
        self._last = why, tenant
        self.rejections[why] += num_requests
        self.tenants[tenant].rejected += num_requests

    def rejected_with_it(self, num_requests: int) -> None:
        """Count further requests of the call whose request was refused last."""
        if self._last is not None:
            self.rejected(*self._last, num_requests)

    def served(self, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """Count a request that ran and has ended."""
        counts = self.tenants[tenant]
        counts.requests += 1
        counts.input_tokens += input_tokens
        counts.output_tokens += output_tokens
