"""One limit per tenant, however many routers it asks: each tells the others what it has given. Pure.

Every router keeps a whole account of each tenant and takes from it what the others say they gave. What is told are
sums, so nothing is counted twice, whatever is lost or read again on the way. Between a request and
the others' knowing of it pass some tenths of a second: by that much a limit may be overdrawn, and the account then has
to fill up again. What a router gave before it was first heard of is not known and not counted.
"""

import hmac
from collections.abc import Callable, Iterable, Set
from functools import lru_cache

from router.tenants.rate_limits import RateLimiter
from tandem.cluster_state.entries import MAX_TALLIES, TAG_BYTES, TenantTally
from tandem.config.admission import LimitsConfig
from tandem.values.ids import Incarnation

_MAX_TENANTS = 1 << 16


def tenant_tags(secret: bytes) -> Callable[[str], bytes]:
    """How tenants are called among routers: their names are nobody else's business."""
    key = hmac.digest(secret, b"tandem tenant v1", "sha256")

    @lru_cache(maxsize=_MAX_TENANTS)
    def tag(tenant: str) -> bytes:
        return hmac.digest(key, tenant.encode(), "sha256")[:TAG_BYTES]

    return tag


class SharedRateLimits:
    """One router's part."""

    def __init__(self, limiter: RateLimiter, *, tenants: Iterable[str], tag_of: Callable[[str], bytes]) -> None:
        """`tenants`: all that there are; who is called otherwise is not known here."""
        self.limiter = limiter
        self._tag_of = tag_of
        self._tenant_of: dict[bytes, str] = {}
        self._know(tenants)
        self._heard: dict[Incarnation, dict[bytes, TenantTally]] = {}
        limiter.num_elsewhere = self._num_elsewhere

    def reconfigure(self, limits: LimitsConfig, tenants: Iterable[str]) -> None:
        """Others are in force from now on, for these tenants. What was used before still counts."""
        self.limiter.reconfigure(limits)
        self._know(tenants)

    def tallies(self) -> tuple[TenantTally, ...]:
        """What this router has given, for the others."""
        return tuple(
            TenantTally(
                tenant=self._tag_of(usage.tenant),
                epoch=usage.epoch,
                requests=usage.requests,
                tokens=max(0, usage.tokens),
                num_inflight=usage.num_inflight,
            )
            for usage in self.limiter.usages()[:MAX_TALLIES]
        )

    def apply_remote(self, router: Incarnation, tallies: Iterable[TenantTally]) -> None:
        """What another router has given until now."""
        former = self._heard.get(router)
        latest = self._heard[router] = {tally.tenant: tally for tally in tallies if tally.tenant in self._tenant_of}
        if former is None:
            return
        for tag, tally in latest.items():
            before = former.get(tag)
            known = before if before is not None and before.epoch == tally.epoch else None
            requests = tally.requests - (known.requests if known else 0)
            tokens = tally.tokens - (known.tokens if known else 0)
            if requests or tokens:
                self.limiter.used_elsewhere(self._tenant_of[tag], requests, tokens)

    def keep(self, routers: Set[Incarnation]) -> None:
        """Those that are here; what the others had under way has ended."""
        for router in self._heard.keys() - routers:
            del self._heard[router]

    def _know(self, tenants: Iterable[str]) -> None:
        self._tenant_of = {self._tag_of(tenant): tenant for tenant in tenants}

    def _num_elsewhere(self, tenant: str) -> int:
        tag = self._tag_of(tenant)
        return sum(told[tag].num_inflight for told in self._heard.values() if tag in told)
