"""Tracks the service that each tenant has had, so that the tenant served least is next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): input tokens are
counted when a request is served, output tokens as they come, divided by the tenant's weight. A tenant that begins to
wait is lifted to the lowest counter of the waiting tenants, or to that of the last one served when none waits, so that
idle tenants do not accumulate a claim. Unlike in the paper, it keeps a bounded credit: a tenant below its share is then
served at once when several of its requests arrive together, as it would be alone. Two tenants that wait all the time
never differ by more than that credit and one request.

Service that a tenant had while no other waited was taken from no one, and is no debt. So the level to which tenants are
lifted is kept: it never falls, and in such times it rises by what the cluster could have done, until all tenants have
their whole credit. Otherwise a tenant that had been idle, with its credit intact, would go before those that had been
served meanwhile, and delay them. Pure.
"""

from collections.abc import Callable, Collection


class VirtualCounters:
    """One counter per tenant. Tenants are those of the configured keys, which bounds their number."""

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
        """Counter value that an even share has reached."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float:
        """Return the cost of tokens, before weights."""
        return self._input_weight * input_tokens + self._output_weight * output_tokens

    def counter(self, tenant: str) -> float:
        """Return the tenant's service so far, over its weight."""
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        return self._weight_of(tenant)

    def activate(self, tenant: str, waiting: Collection[str], *, credit: float = 0.0) -> None:
        """Let a tenant begin to wait beside `waiting`; `credit`: how far it may stay behind them, in cost."""
        # Lifting it to the level, or to less, does not raise the level.
        self._level = level = self._level_among(tenant, waiting)
        self._counters[tenant] = self._lifted_to(level, tenant, credit)

    def lifted(self, tenant: str, waiting: Collection[str], *, credit: float = 0.0) -> float:
        """Return what its counter would be if it began to wait now."""
        return self._lifted_to(self._level_among(tenant, waiting), tenant, credit)

    def unclaimed(self, tenant: str, cost: float, *, credit: float) -> None:
        """Record that there was room, and no request waited, for so long that `cost` could have been done.

        `tenant`, whose request arrives now, might have had all of it.
        """
        if self._counters:
            weight = self._weight_of(tenant)
            level = self._level_among(tenant, ())
            most = max(self._counters.values()) + credit / weight
            self._level = max(level, min(level + cost / weight, most))

    def served(self, tenant: str, *, input_tokens: float) -> None:
        """Count a request of the tenant that got its turn."""
        self._last_served = tenant
        self.charge(tenant, input_tokens=input_tokens)

    def charge(self, tenant: str, *, input_tokens: float = 0.0, output_tokens: float = 0.0) -> None:
        """Count tokens; negative numbers refund what was counted too much."""
        cost = self._input_weight * input_tokens + self._output_weight * output_tokens
        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost / self._weight_of(tenant)

    def _lifted_to(self, level: float, tenant: str, credit: float) -> float:
        if (own := self._counters.get(tenant)) is None:
            # A new tenant brings no credit: credit is capacity that a tenant left unused.
            return level
        return max(own, level - credit / self._weight_of(tenant))

    def _level_among(self, tenant: str, waiting: Collection[str]) -> float:
        if waiting and (others := [self.counter(other) for other in waiting if other != tenant]):
            return max(self._level, min(others))
        return self._level if self._last_served is None else max(self._level, self._counters[self._last_served])
