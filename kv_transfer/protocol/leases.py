"""Leases: a right that ends by itself unless renewed, timed on its issuer's clock alone."""


class Lease:
    """A deadline that renewals push back."""

    __slots__ = ("_duration_s", "_end_s")

    def __init__(self, duration_s: float, now: float) -> None:
        self._duration_s = duration_s
        self._end_s = now + duration_s

    def renew(self, now: float) -> None:
        """Count the full duration again from `now`; never shortens the lease."""
        self._end_s = max(self._end_s, now + self._duration_s)

    def expired(self, now: float) -> bool:
        """Whether the holder's time is over."""
        return now >= self._end_s


class LeaseClock:
    """Monotonic seconds that stand still while this process itself does.

    A process that was stopped or starved finds its peers' renewals unread; without this clock it would blame them
    for its own pause. Each tick counts at most `max_step_s`; peers judge this process by their own clocks.
    """

    __slots__ = ("_last_s", "_lost_s", "_max_step_s")

    def __init__(self, now: float, *, max_step_s: float) -> None:
        self._last_s = now
        self._lost_s = 0.0
        self._max_step_s = max_step_s

    def tick(self, now: float) -> float:
        """Lease time at monotonic time `now`, called once a sweep."""
        step = now - self._last_s
        self._lost_s += max(0.0, step - self._max_step_s)
        self._last_s = now
        return now - self._lost_s

    def read(self, now: float) -> float:
        """Lease time between two ticks."""
        return min(now, self._last_s + self._max_step_s) - self._lost_s
