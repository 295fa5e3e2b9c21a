"""Bounds on requests being prepared, running and waiting, and the refusals of requests beyond them. Pure.

429 when the queue is full, and when too many prompts wait for the tokenizer; 503 when a request would come too late or
the router is draining. Each refusal says when to retry. A tenant's own limits are in `router.admission.rate_limits`,
a worker's own queue limit in `engine.scheduler.scheduler`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.admission.cluster_capacity import ClusterCapacity
from router.admission.counts import AdmissionCounts, Rejection
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.rate_limits import limit_reached
from router.admission.types import AdmissionPolicy
from router.admission.wait_forecast import WaitForecast
from tandem.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable

_DRAINING_RETRY_S = 1.0
"""By then another router, or this one's successor, answers."""
_PREPARATION_RETRY_S = 1.0


class PreparationLimit:
    """Bounds the requests that wait for the tokenizer or for a grammar, before admission knows their length.

    A tenant has at most as many as places are free, and never more than its `concurrent_requests`: so there are places
    for others whatever it sends. The unnamed tenant may have them all: where it calls, there are no others.
    """

    def __init__(self, most: int, max_concurrent: Callable[[str], int | None] = lambda _tenant: None) -> None:
        """`max_concurrent`: returns a tenant's `concurrent_requests`; None: it has no such limit."""
        self._most = most
        self._max_concurrent = max_concurrent
        self._num_preparing = 0
        self._of_tenants: dict[str, int] = {}
        """How many of them each tenant has; only tenants that have some."""

    @contextmanager
    def preparing(self, tenant: str = "") -> Iterator[None]:
        """Count a request of the tenant while inside. Raises Overloaded on entering."""
        count = self._of_tenants.get(tenant, 0)
        self._check(tenant, count)
        self._num_preparing += 1
        self._of_tenants[tenant] = count + 1
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def _check(self, tenant: str, count: int) -> None:
        num_free = self._most - self._num_preparing
        if num_free <= 0:
            message = f"{self._num_preparing} requests are waiting to be tokenized"
            raise Overloaded(message, retry_after_s=_PREPARATION_RETRY_S)
        if tenant and count >= num_free:
            message = f"{count} requests of this API key are waiting to be tokenized"
            raise Overloaded(message, retry_after_s=_PREPARATION_RETRY_S)
        if count and (bound := self._max_concurrent(tenant)) is not None and count >= bound:
            raise limit_reached("concurrent_requests", bound, _PREPARATION_RETRY_S)


class InflightLimit:
    """Bounds the requests that a router runs at once, `router.max_inflight_requests`; those beyond it wait.

    Requests of positive priority (later than normal) may fill only a share of the slots.
    """

    def __init__(self, policy: AdmissionPolicy, num_running: Callable[[], int]) -> None:
        self._max_inflight = policy.max_inflight
        self._max_background = max(1, int(policy.max_inflight * policy.background_share))
        self._num_running = num_running

    def num_free(self, priority: int) -> int:
        """Slots that requests of a priority could have now; below 0 when others hold its share."""
        return (self._max_background if priority > 0 else self._max_inflight) - self._num_running()


class QueueLimits:
    """Bounds of one router's queue: which requests are evicted when it is full, and how refusals are worded."""

    def __init__(
        self,
        queue: FairQueue,
        counters: VirtualCounters,
        forecast: WaitForecast,
        *,
        policy: AdmissionPolicy,
        counts: AdmissionCounts,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._counters = counters
        self._forecast = forecast
        self._policy = policy
        self._counts = counts
        self._clock = clock

    def draining_error(self, tenant: str, num_requests: int) -> Unavailable:
        """Make the refusal of a whole call by a router that is shutting down."""
        self._counts.rejected(Rejection.DRAINING, tenant, num_requests)
        return Unavailable("the router is draining", retry_after_s=_DRAINING_RETRY_S)

    def evict_for(self, ticket: Ticket, room: ClusterCapacity) -> list[Ticket]:
        """Return the requests to evict in favour of `ticket`: of the worst priority, the end of the longest line.

        Raises Overloaded if evicting them would not make enough room, or they rank before `ticket`.
        """
        num_waiting, num_tokens = self._queue.num_requests, self._queue.num_tokens + ticket.num_tokens
        found: list[Ticket] = []
        for victim, line_cost in self._queue.eviction_order():
            if num_waiting < self._policy.max_requests and num_tokens <= self._policy.max_tokens:
                break
            if not self._displaces(ticket, victim, line_cost):
                raise self.queue_full_error(ticket, room)
            found.append(victim)
            num_waiting, num_tokens = num_waiting - 1, num_tokens - victim.num_tokens
        return found

    def queue_full_error(self, ticket: Ticket, room: ClusterCapacity) -> Overloaded:
        """Make the refusal of a request that the queue has no room for."""
        wait_s = ticket.cost / self._forecast.meter.rate(room.prefill_tokens_per_s)
        self._counts.rejected(Rejection.QUEUE_FULL, ticket.tenant)
        retry_s = self._forecast.retry_after_s(ticket, wait_s, room)
        return Overloaded(f"{self._queue.num_requests} requests are waiting", retry_after_s=retry_s)

    def too_late_error(
        self, ticket: Ticket, why: Rejection, over_s: float, room: ClusterCapacity, *, waited: bool = False
    ) -> ServingError:
        """Make the refusal of a request that would come `over_s` too late; `waited`: it was admitted before."""
        self._counts.rejected(Rejection.HOPELESS if waited else why, ticket.tenant)
        if why is Rejection.DEADLINE and ticket.deadline_s is not None and ticket.deadline_s <= self._clock():
            return DeadlineExceeded("the request's deadline passed while it was queued")
        retry_s = self._forecast.retry_after_s(ticket, over_s, room)
        why_late = "no decode worker accepts requests" if room.awaited else "the cluster is overloaded"
        bound = "its deadline" if why is Rejection.DEADLINE else f"{self._policy.max_queue_s:g} s"
        return Unavailable(f"{why_late}: the wait would be longer than {bound}", retry_after_s=retry_s)

    def _displaces(self, ticket: Ticket, victim: Ticket, line_cost: float) -> bool:
        if victim.priority != ticket.priority:
            return victim.priority > ticket.priority
        weight = self._counters.weight(ticket.tenant)
        own = self._queue.line_cost(ticket.tenant, ticket.priority) + ticket.cost / weight
        return ticket.tenant != victim.tenant and own < line_cost
