"""How much each tenant has had, so that the one that had least is served next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): input tokens are
counted when a request is served, output tokens as they come, divided by the tenant's weight. A tenant that begins to
wait is lifted to the least counter of those that wait, or to that of the last one served when nobody does, so that
nobody saves up a claim while idle. Unlike there, a bounded credit is left to it: who stays below its share is then
served at once when several of its requests come together, as it would be alone. Two tenants that wait all the time
never differ by more than that credit and a request.

What one had while nobody waited was taken from nobody, and is no debt. So the level to which tenants are lifted is
kept: it never falls, and rises in such times by what the cluster could have done, until all have their whole credit.
Else whoever had been idle, and had it, went before those that had been served meanwhile, and held them up. Pure.
"""

from collections.abc import Callable, Iterable


class VirtualCounters:
    """One counter a tenant. Tenants are those of the configured keys, so their number is bounded by it."""

    def __init__(
        self, *, weight_of: Callable[[str], float], input_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        """`weight_of`: a tenant's share relative to others', above 0."""
        self._weight_of = weight_of
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[str, float] = {}
        self._last_served: str | None = None
        self._level = 0.0
        """What an even share has come to."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float:
        """What tokens count, before weights."""
        return self._input_weight * input_tokens + self._output_weight * output_tokens

    def counter(self, tenant: str) -> float:
        """Its service so far, over its weight."""
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        return self._weight_of(tenant)

    def activate(self, tenant: str, waiting: Iterable[str], *, credit: float = 0.0) -> None:
        """It begins to wait beside those that do; `credit`: how far it may stay behind them, in cost."""
        waiting = list(waiting)
        self._counters[tenant] = self.lifted(tenant, waiting, credit=credit)
        self._level = self._level_among(tenant, waiting)

    def lifted(self, tenant: str, waiting: Iterable[str], *, credit: float = 0.0) -> float:
        """What its counter would be if it began to wait now."""
        level = self._level_among(tenant, waiting)
        if (own := self._counters.get(tenant)) is None:
            # Nobody comes with a credit: it is what one did not take while it could.
            return level
        return max(own, level - credit / self._weight_of(tenant))

    def unclaimed(self, tenant: str, cost: float, *, credit: float) -> None:
        """There was room, and nobody waited, for so long that `cost` could have been done.

        `tenant`, who comes now, might have had all of it.
        """
        if self._counters:
            weight = self._weight_of(tenant)
            level = self._level_among(tenant, ())
            most = max(self._counters.values()) + credit / weight
            self._level = max(level, min(level + cost / weight, most))

    def served(self, tenant: str, *, input_tokens: float) -> None:
        """A request of its has got its turn."""
        self._last_served = tenant
        self.charge(tenant, input_tokens=input_tokens)

    def charge(self, tenant: str, *, input_tokens: float = 0.0, output_tokens: float = 0.0) -> None:
        """Count tokens; below zero takes back what was counted too much."""
        cost = self.cost(input_tokens=input_tokens, output_tokens=output_tokens)
        self._counters[tenant] = self.counter(tenant) + cost / self._weight_of(tenant)

    def _level_among(self, tenant: str, waiting: Iterable[str]) -> float:
        others = [self.counter(other) for other in waiting if other != tenant]
        if others:
            return max(self._level, min(others))
        return self._level if self._last_served is None else max(self._level, self.counter(self._last_served))
