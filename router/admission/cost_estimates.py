"""The cost that a request is expected to have on arrival, estimated from its tenant's earlier requests. Pure."""

from collections.abc import Callable

from router.admission.fair_queue import Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionEntry, AdmissionRequest

_SMOOTHING = 0.1
_USUAL_OUTPUT_TOKENS = 128.0
"""Assumed for a new tenant while no other tenant has been measured either."""


class TicketIssuer:
    """Makes the tickets of one router, and learns from requests that have ended."""

    def __init__(self, counters: VirtualCounters, limiter: RateLimiter, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._limiter = limiter
        self._clock = clock
        self._num_made = 0
        self._means: dict[str, tuple[float, float]] = {}
        """Running means per tenant: answer tokens over all choices, and the uncached share of the prompt."""
        self._mean = (_USUAL_OUTPUT_TOKENS, 1.0)
        """Those of all requests: a new tenant is assumed to be like them."""

    def make(self, wanted: AdmissionRequest) -> Ticket:
        """Make a ticket, numbered in order of arrival, which is now."""
        self._num_made += 1
        tenant = wanted.tenant
        output, share = self._means.get(tenant, self._mean)
        work, output = wanted.num_tokens * share, min(float(wanted.max_output_tokens), output)
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
        """Charge the tenant what a request that ended well really cost; `cached_tokens` of its prompt were cached."""
        ticket = entry.ticket
        computed = max(0, ticket.num_tokens - cached_tokens)
        self._counters.charge(ticket.tenant, input_tokens=computed - ticket.work_tokens)
        if ticket.num_tokens:
            output, share = float(entry.output_tokens), computed / ticket.num_tokens
            mean_output, mean_share = self._means.get(ticket.tenant, (output, share))
            self._means[ticket.tenant] = (
                mean_output + _SMOOTHING * (output - mean_output),
                mean_share + _SMOOTHING * (share - mean_share),
            )
            mean_output, mean_share = self._mean
            self._mean = (
                mean_output + _SMOOTHING * (output - mean_output),
                mean_share + _SMOOTHING * (share - mean_share),
            )
