"""What a request is expected to cost when it comes, by what its tenant's earlier ones were like. Pure."""

from collections.abc import Callable

from router.admission.fair_queue import Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.tenant_stats import TenantStats
from router.admission.types import AdmissionEntry, AdmissionRequest
from router.tenants.rate_limits import Limiter


class TicketIssuer:
    """Makes those of one router, and learns from those that have ended."""

    def __init__(self, counters: VirtualCounters, limiter: Limiter, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._limiter = limiter
        self._clock = clock
        self._habits = TenantStats()
        self._num_made = 0

    def make(self, wanted: AdmissionRequest) -> Ticket:
        """In order of arrival, which is now."""
        self._num_made += 1
        tenant, most = wanted.tenant, wanted.max_output_tokens
        output, share = self._habits.of(tenant)
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
        """It has ended; so much of its prompt was cached. What it really cost is what its tenant is charged."""
        ticket = entry.ticket
        computed = max(0, ticket.num_tokens - cached_tokens)
        self._counters.charge(ticket.tenant, input_tokens=computed - ticket.work_tokens)
        if ticket.num_tokens:
            share = computed / ticket.num_tokens
            self._habits.learn(ticket.tenant, output_tokens=entry.output_tokens, computed_share=share)
