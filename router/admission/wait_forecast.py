"""Predicts a request's wait for its turn, whether that is too late, and its Retry-After if so. Pure.

The predicted wait is the time in the queue, from what is served before it in fair order at the rate at which the queue
drains, plus the backlog of the worker that finishes first, plus its own prompt.
"""

from collections.abc import Callable

from router.admission.cluster_capacity import ClusterCapacity, DrainMeter
from router.admission.counts import Rejection
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.turn_rule import TurnRule
from router.admission.types import AdmissionPolicy

_LONGEST_S = 60.0
_SHORTEST_S = 0.1


class RetryAfterEstimator:
    def __init__(self, *, now_s: float) -> None:
        # Refused requests whose retry time has not passed yet.
        self._owed_cost = 0.0
        self._since_s = now_s

    def retry_after_s(self, cost: float, over_s: float, *, rate: float, now_s: float) -> float:
        """Seconds until there is room for a request that arrives `over_s` too early, behind all that were refused
        before it.

        `rate`: the cost served per second.
        """
        self._owed_cost = max(0.0, self._owed_cost - rate * (now_s - self._since_s))
        self._since_s = now_s
        wait_s = over_s + self._owed_cost / rate
        self._owed_cost += cost
        return min(_LONGEST_S, max(_SHORTEST_S, wait_s))


class WaitForecast:
    """Predicts waiting times in the queue of one router."""

    def __init__(
        self,
        queue: FairQueue,
        rule: TurnRule,
        *,
        policy: AdmissionPolicy,
        clock: Callable[[], float],
        num_refused: Callable[[], int],
    ) -> None:
        """`num_refused`: as in `TurnRule`."""
        self._queue = queue
        self._rule = rule
        self._policy = policy
        self._clock = clock
        self._num_refused = num_refused
        self._retry = RetryAfterEstimator(now_s=clock())
        self.last_seen_s: dict[str, float] = {}
        """Time of each tenant's latest request here: when it arrived or ended."""
        self.meter = DrainMeter(now_s=clock(), input_weight=policy.input_weight)

    def credit(self, ticket: Ticket, room: ClusterCapacity) -> float:
        """Return, in cost, how far its tenant may stay behind the others, unless it has been away too long."""
        away_s = ticket.arrived_s - self.last_seen_s.get(ticket.tenant, ticket.arrived_s)
        if away_s >= self._policy.credit_lapses_s:
            return 0.0
        return self._policy.credit_s * self.meter.rate(room.prefill_tokens_per_s)

    def whole_s(self, room: ClusterCapacity) -> float:
        """Seconds until everything queued has been served: no request waits longer."""
        cost = sum(ticket.cost for ticket in self._queue)
        return cost / self.meter.rate(room.prefill_tokens_per_s) + room.least_wait_s

    def wait_s(self, ticket: Ticket, room: ClusterCapacity) -> float:
        """Seconds until a worker begins its prompt."""
        first = self._queue.first()
        if first is None and self._rule.shortage(ticket, room) is None:
            return room.least_wait_of(ticket.num_tokens)
        local = room.unblocked_local_prefill(ticket.num_tokens)
        # A request that cannot overtake the first one waits as long as that one.
        if (
            local
            and not self._num_refused()
            and (
                first is None
                or room.unblocked_local_prefill(first.num_tokens)
                or self._rule.can_be_overtaken(first, room)
            )
        ):
            return self._queue.within(local.most_tokens) / local.tokens_per_s + local.wait_s
        ahead = self._queue.ahead_of(ticket, credit=self.credit(ticket, room))
        return (ahead.cost + ticket.cost) / self.meter.rate(room.prefill_tokens_per_s) + room.least_wait_s

    def lateness(
        self, ticket: Ticket, room: ClusterCapacity, wait_s: float, *, share: float, patience: float = 1.0
    ) -> tuple[Rejection, float] | None:
        """Return why it would come too late with that share of the time to its deadline, and by how many seconds.

        `wait_s`: until a worker begins its prompt.
        """
        now_s = self._clock()
        if ticket.deadline_s is not None:
            over_s = wait_s + room.compute_s(ticket.work_tokens) - share * (ticket.deadline_s - now_s)
            if over_s > 0.0:
                return Rejection.DEADLINE, over_s
        over_s = now_s - ticket.arrived_s + wait_s - patience * self._policy.max_queue_s
        return (Rejection.QUEUE_TIME, over_s) if over_s > 0.0 else None

    def left_s(self, ticket: Ticket, room: ClusterCapacity, patience: float) -> float:
        """Return the seconds that it may still wait."""
        now_s = self._clock()
        left_s = ticket.arrived_s + patience * self._policy.max_queue_s - now_s
        if ticket.deadline_s is None:
            return left_s
        return min(left_s, ticket.deadline_s - now_s - room.compute_s(ticket.work_tokens))

    def retry_after_s(self, ticket: Ticket, over_s: float, room: ClusterCapacity) -> float:
        """Return the Retry-After of a request that arrives `over_s` too early."""
        return self._retry.retry_after_s(
            ticket.cost, over_s, rate=self.meter.rate(room.prefill_tokens_per_s), now_s=self._clock()
        )
