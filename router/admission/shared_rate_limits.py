"""One limit per tenant across the routers of several hosts: each publishes what it has admitted. Pure.

Every host keeps a whole account of each tenant and deducts what routers on other hosts admit. Sums are published, so
nothing is counted twice, whatever is lost or read again on the way. Other hosts learn of a request some tenths of a
second later: by that much a limit may be overdrawn, and the account then has to refill. What a router admitted before
it was first heard of is unknown and not counted.
"""

import hmac
from collections.abc import Callable, Iterable, Set
from functools import lru_cache
from typing import Protocol

from router.admission.rate_limits import RateLimiter
from tandem.cluster_state.entries import MAX_TALLIES, TAG_BYTES, TenantTally
from tandem.config.admission import LimitsConfig
from tandem.values.ids import Incarnation

_MAX_TENANTS = 1 << 16


def tenant_tags(secret: bytes) -> Callable[[str], bytes]:
    """Return a function that names tenants between routers; without the secret the names do not reveal who they are."""
    key = hmac.digest(secret, b"tandem tenant v1", "sha256")

    @lru_cache(maxsize=_MAX_TENANTS)
    def tag(tenant: str) -> bytes:
        return hmac.digest(key, tenant.encode(), "sha256")[:TAG_BYTES]

    return tag


class HostAccount(Protocol):
    """The account that the router processes of one host share: `router.host_peers.rate_limits.RateLimitFile`."""

    def routers(self) -> frozenset[Incarnation]:
        """Return the routers whose requests the account counts by itself."""

    def is_first(self) -> bool:
        """Whether this is the process that counts, for all of them, what other hosts admitted."""


class SharedRateLimits:
    """Publishes one router's use by its tenants, and applies that of other routers."""

    def __init__(
        self,
        limiter: RateLimiter,
        *,
        tenants: Iterable[str],
        tag_of: Callable[[str], bytes],
        host: HostAccount | None = None,
    ) -> None:
        """`tenants`: all that exist; others are unknown here. `host`: None for a router that shares its account with no
        other process.
        """
        self.limiter = limiter
        self._host = host
        self._tag_of = tag_of
        self._tenant_of: dict[bytes, str] = {}
        self._know(tenants)
        self._heard: dict[Incarnation, dict[bytes, TenantTally]] = {}
        limiter.num_elsewhere = self._num_elsewhere

    def reconfigure(self, limits: LimitsConfig, tenants: Iterable[str]) -> None:
        """Use other limits from now on, for these tenants. Earlier usage still counts."""
        self.limiter.reconfigure(limits)
        self._know(tenants)

    def tallies(self) -> tuple[TenantTally, ...]:
        """Return the sums of what this router has admitted, for other hosts."""
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
        """Count what another router has admitted since its last report; ignores processes of this host."""
        if self._host is not None and router in self._host.routers():
            return
        former = self._heard.get(router)
        latest = self._heard[router] = {tally.tenant: tally for tally in tallies if tally.tenant in self._tenant_of}
        if former is None or not (self._host is None or self._host.is_first()):
            return
        for tag, tally in latest.items():
            before = former.get(tag)
            known = before if before is not None and before.epoch == tally.epoch else None
            requests = tally.requests - (known.requests if known else 0)
            tokens = tally.tokens - (known.tokens if known else 0)
            if requests or tokens:
                self.limiter.used_elsewhere(self._tenant_of[tag], requests, tokens)

    def keep(self, routers: Set[Incarnation]) -> None:
        """Forget all other routers: their requests in flight have ended."""
        for router in self._heard.keys() - routers:
            del self._heard[router]

    def _know(self, tenants: Iterable[str]) -> None:
        self._tenant_of = {self._tag_of(tenant): tenant for tenant in tenants}

    def _num_elsewhere(self, tenant: str) -> int:
        tag = self._tag_of(tenant)
        return sum(tallies[tag].num_inflight for tallies in self._heard.values() if tag in tallies)
