"""Leaves a worker alone that keeps failing, and tries it again with one request at a time. Pure.

    CLOSED -- several failures in a row, or too large a share of them --> OPEN -- after a while --> HALF_OPEN
    HALF_OPEN -- the probe ended well --> CLOSED; -- it failed --> OPEN, for twice as long

A full worker has not failed. A restarted worker is another one, with a breaker of its own.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from router.types.worker_view import WorkerKey


class BreakerState(Enum):
    """Whether a worker gets requests; a label."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBreakerPolicy:
    """When to give up and when to try again."""

    most_in_a_row: int = 5
    failure_share: float = 0.5
    least_outcomes: float = 10.0
    """Below this a share says nothing."""
    remembered_s: float = 30.0
    open_s: float = 2.0
    longest_open_s: float = 30.0
    probe_s: float = 10.0
    """A probe of which nothing was heard for so long is taken for lost."""


class WorkerCircuitBreaker:
    __slots__ = (
        "_failed",
        "_in_a_row",
        "_num_trips",
        "_opened_until_s",
        "_policy",
        "_probed_s",
        "_seen_s",
        "_total",
        "_tripped",
    )

    def __init__(self, policy: WorkerBreakerPolicy) -> None:
        self._policy = policy
        self._in_a_row = 0
        self._total = 0.0
        self._failed = 0.0
        self._seen_s = 0.0
        self._tripped = False
        self._num_trips = 0
        self._opened_until_s = 0.0
        self._probed_s: float | None = None

    def state(self, now_s: float) -> BreakerState:
        if not self._tripped:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._opened_until_s else BreakerState.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether the worker may get a request."""
        state = self.state(now_s)
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.CLOSED
        return self._probed_s is None or now_s - self._probed_s >= self._policy.probe_s

    def began(self, now_s: float) -> None:
        """It got one: of a half-open breaker this is the probe."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._probed_s = now_s

    def succeeded(self, now_s: float) -> None:
        """A request got a token from it. What was begun before the breaker opened says nothing while it is open."""
        self._count(now_s, 0.0)
        self._in_a_row = 0
        if self._tripped and self._probed_s is not None:
            self._tripped, self._num_trips, self._probed_s = False, 0, None
            self._total = self._failed = 0.0

    def failed(self, now_s: float) -> None:
        """It refused, broke off or broke the protocol, for a reason of its own."""
        self._count(now_s, 1.0)
        self._in_a_row += 1
        policy, state = self._policy, self.state(now_s)
        share = self._failed / self._total
        if state is BreakerState.OPEN:
            return
        if (
            state is BreakerState.HALF_OPEN
            or self._in_a_row >= policy.most_in_a_row
            or (self._total >= policy.least_outcomes and share >= policy.failure_share)
        ):
            self._open(now_s)

    def released(self) -> None:
        """A request was taken back before anything was known of it: if it was the probe, another may follow."""
        self._probed_s = None

    def _open(self, now_s: float) -> None:
        policy = self._policy
        self._opened_until_s = now_s + min(policy.longest_open_s, policy.open_s * 2.0 ** min(self._num_trips, 16))
        self._num_trips += 1
        self._tripped, self._probed_s = True, None

    def _count(self, now_s: float, failed: float) -> None:
        kept = math.exp(min(0.0, self._seen_s - now_s) / self._policy.remembered_s)
        self._total, self._failed, self._seen_s = self._total * kept + 1.0, self._failed * kept + failed, now_s


class WorkerBreakers:
    """Those of all workers that ever failed; the others' are closed."""

    def __init__(self, policy: WorkerBreakerPolicy | None = None) -> None:
        self._policy = policy or WorkerBreakerPolicy()
        self._breakers: dict[WorkerKey, WorkerCircuitBreaker] = {}

    def closed_to(self, now_s: float) -> set[WorkerKey]:
        """Workers that get no request now."""
        return {key for key, breaker in self._breakers.items() if not breaker.allows(now_s)}

    def began(self, key: WorkerKey, now_s: float) -> None:
        """A request was sent there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.began(now_s)

    def succeeded(self, key: WorkerKey, now_s: float) -> None:
        """A token came from there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.succeeded(now_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """It failed on a request."""
        self._breakers.setdefault(key, WorkerCircuitBreaker(self._policy)).failed(now_s)

    def released(self, key: WorkerKey) -> None:
        """A request was taken back from there."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.released()

    def keep(self, live: Collection[WorkerKey]) -> None:
        """Forget workers that are gone."""
        for key in self._breakers.keys() - set(live):
            del self._breakers[key]

    def states(self, now_s: float) -> Mapping[WorkerKey, BreakerState]:
        """Of workers that ever failed."""
        return {key: breaker.state(now_s) for key, breaker in self._breakers.items()}
