"""The cost that a request is expected to have on arrival, estimated from its tenant's earlier requests. Pure."""

from collections.abc import Callable

from router.admission.fair_queue import Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionEntry, AdmissionRequest

_SMOOTHING = 0.1
_USUAL_OUTPUT_TOKENS = 128.0
"""Assumed for a new tenant while no other tenant has been measured either."""


class TenantStats:
    """Running means per tenant; a new tenant is assumed to be like the mean of all requests."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}
        self._all = (_USUAL_OUTPUT_TOKENS, 1.0)

    def expected(self, tenant: str) -> tuple[float, float]:
        """Return the expected answer tokens over all choices, and the expected uncached share of the prompt."""
        return self._of.get(tenant, self._all)

    def learn(self, tenant: str, *, output_tokens: float, computed_share: float) -> None:
        """Learn from a request that has ended well."""
        output, share = self._of.get(tenant, (output_tokens, computed_share))
        self._of[tenant] = (
            output + _SMOOTHING * (output_tokens - output),
            share + _SMOOTHING * (computed_share - share),
        )
        output, share = self._all
        self._all = (output + _SMOOTHING * (output_tokens - output), share + _SMOOTHING * (computed_share - share))


class TicketIssuer:
    """Makes the tickets of one router, and learns from requests that have ended."""

    def __init__(self, counters: VirtualCounters, limiter: RateLimiter, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._limiter = limiter
        self._clock = clock
        self._stats = TenantStats()
        self._num_made = 0

    def make(self, wanted: AdmissionRequest) -> Ticket:
        """Make a ticket, numbered in order of arrival, which is now."""
        self._num_made += 1
        tenant, most = wanted.tenant, wanted.max_output_tokens
        output, share = self._stats.expected(tenant)
        work, output = wanted.num_tokens * share, min(float(most), output)
        return Ticket(
            tenant=tenant,
            priority=self._limiter.priority(tenant, wanted.priority),
            num_tokens=wanted.num_tokens,
            work_tokens=work,
            output_tokens=output,
            cost=self._counters.cost(input_tokens=work, output_tokens=output),
            number=self._num_made,
            arrived_s=self._clock(),
            deadline_s=wanted.deadline_s,
        )

    def learn(self, entry: AdmissionEntry, cached_tokens: int) -> None:
        """Charge the tenant what an ended request really cost; `cached_tokens` of its prompt were cached."""
        ticket = entry.ticket
        computed = max(0, ticket.num_tokens - cached_tokens)
        self._counters.charge(ticket.tenant, input_tokens=computed - ticket.work_tokens)
        if ticket.num_tokens:
            share = computed / ticket.num_tokens
            self._stats.learn(ticket.tenant, output_tokens=entry.output_tokens, computed_share=share)
