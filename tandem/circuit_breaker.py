"""Stops calls to a peer that keeps failing, and probes it later with one call at a time. Pure.

CLOSED -- several failures in a row, or too large a share of them --> OPEN -- after a while --> HALF_OPEN
HALF_OPEN -- the probe succeeded --> CLOSED; -- it failed --> OPEN, for twice as long
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random

from tandem.backoff import Backoff


class BreakerState(Enum):
    """Whether calls are allowed; a metric label."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """Thresholds at which a breaker opens, and times after which it probes."""

    most_in_a_row: int = 5
    failure_share: float = 0.5
    least_outcomes: float = 10.0
    """Minimum number of outcomes, faded, for `failure_share` to count."""
    remembered_s: float = 30.0
    open: Backoff = field(default_factory=partial(Backoff, first_s=2.0, most_s=30.0))
    probe_s: float = 10.0
    """A probe without an outcome for this long counts as lost."""


class CircuitBreaker:
    __slots__ = (
        "_failed",
        "_in_a_row",
        "_num_trips",
        "_opened_until_s",
        "_policy",
        "_probed_s",
        "_rng",
        "_seen_s",
        "_total",
        "_tripped",
    )

    def __init__(self, policy: BreakerPolicy, rng: Random | None = None) -> None:
        """`rng`: spreads the probes of breakers that opened together; None: not spread."""
        self._policy = policy
        self._rng = rng
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
        """Whether a call may begin."""
        return self.wait_s(now_s) <= 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until a call may begin; 0: now."""
        if not self._tripped:
            return 0.0
        until_s = self._opened_until_s if self._probed_s is None else self._probed_s + self._policy.probe_s
        return max(0.0, until_s - now_s)

    def began(self, now_s: float) -> None:
        """Record that a call began; in a half-open breaker it is the probe."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._probed_s = now_s

    def succeeded(self, now_s: float) -> None:
        """Record a success; while the breaker is open, that of a call begun earlier does not close it."""
        self._count(now_s, 0.0)
        self._in_a_row = 0
        if self._tripped and self._probed_s is not None:
            self._tripped, self._num_trips, self._probed_s = False, 0, None
            self._total = self._failed = 0.0

    def failed(self, now_s: float) -> None:
        """Record a failure that the peer itself caused."""
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
            self._trip(now_s)

    def released(self) -> None:
        """Record that a call was withdrawn without an outcome; if it was the probe, another call may be."""
        self._probed_s = None

    def _trip(self, now_s: float) -> None:
        self._num_trips += 1
        self._opened_until_s = now_s + self._policy.open.wait_s(self._num_trips, self._rng)
        self._tripped, self._probed_s = True, None

    def _count(self, now_s: float, failed: float) -> None:
        kept = math.exp(min(0.0, self._seen_s - now_s) / self._policy.remembered_s)
        self._total, self._failed, self._seen_s = self._total * kept + 1.0, self._failed * kept + failed, now_s
