"""When those who are turned away are told to come back. Pure."""

_LONGEST_S = 60.0
_SHORTEST_S = 0.1


class ComeBack:
    """Each behind all who were told so before and have not had the time to: they come too."""

    def __init__(self, *, now_s: float) -> None:
        self._owed_cost = 0.0
        self._since_s = now_s

    def after_s(self, cost: float, over_s: float, *, rate: float, now_s: float) -> float:
        """Seconds until there will be room for one that costs so much and came `over_s` too early, at that rate."""
        self._owed_cost = max(0.0, self._owed_cost - rate * (now_s - self._since_s))
        self._since_s = now_s
        wait_s = over_s + self._owed_cost / rate
        self._owed_cost += cost
        return min(_LONGEST_S, max(_SHORTEST_S, wait_s))
