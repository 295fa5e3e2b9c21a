"""When those that are turned away are told to come back: one after the other, as room comes. Pure."""

_LONGEST_S = 60.0
_SHORTEST_S = 0.1


class RetryAfterEstimator:
    def __init__(self, *, now_s: float) -> None:
        # What was turned away and told to come back, and has not had the time to.
        self._owed_cost = 0.0
        self._since_s = now_s

    def retry_after_s(self, cost: float, over_s: float, *, rate: float, now_s: float) -> float:
        """Seconds until there is room for one that comes `over_s` too early, behind all who were told so before it.

        `rate`: the cost that is served per second.
        """
        self._owed_cost = max(0.0, self._owed_cost - rate * (now_s - self._since_s))
        self._since_s = now_s
        wait_s = over_s + self._owed_cost / rate
        self._owed_cost += cost
        return min(_LONGEST_S, max(_SHORTEST_S, wait_s))
