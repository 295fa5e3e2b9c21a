"""Limits of each tenant: requests and tokens per minute, requests at once. Requests over a limit get 429. Pure.

Router processes of one host share their counts (`router.host_peers.rate_limits`), so their limits hold exactly. Usage
on other hosts is counted as soon as it is reported (`router.admission.shared_rate_limits`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, Self

from msgspec import Struct

from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import InvalidRequest, Overloaded

_MINUTE_S = 60.0
_PER_REQUEST_S = 1.0
"""Retry-After of a tenant at its bound of concurrent requests when none of its requests has ended yet, times that
bound."""
_SMOOTHING = 0.2
_USUAL_PRIORITY = 0
"""The best priority of a key for which none is configured."""
RECENT_S = 2 * _MINUTE_S
"""After this long without use every account is full again, so that earlier usage no longer matters."""
_MAX_WEIGHTS = 1 << 16
"""Tenants whose weights are remembered: more than there are keys."""


class TokenBucket:
    """A bucket that refills at a rate per minute and holds one minute's worth. Settling may overdraw it; it then
    refills first."""

    __slots__ = ("level", "per_minute", "seen_s")

    def __init__(self, *, per_minute: float, level: float, seen_s: float) -> None:
        """`level`: its content at the time `seen_s`."""
        self.per_minute = per_minute
        self.level = level
        self.seen_s = seen_s

    @classmethod
    def full(cls, per_minute: float, now_s: float) -> Self:
        return cls(per_minute=per_minute, level=float(per_minute), seen_s=now_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` may be taken; 0 when it may be now. More than the bucket holds may be taken when it is
        full."""
        self._fill(now_s)
        return max(0.0, (min(amount, self.per_minute) - self.level) * _MINUTE_S / self.per_minute)

    def consume(self, amount: float, now_s: float) -> None:
        """Take `amount`, into debt if need be; a negative amount is a refund."""
        self._fill(now_s)
        self.level = min(self.per_minute, self.level - amount)

    def resized(self, per_minute: float, now_s: float) -> "TokenBucket":
        """Return a bucket of a new size from which as much is missing."""
        self._fill(now_s)
        return TokenBucket(per_minute=per_minute, level=per_minute - (self.per_minute - self.level), seen_s=now_s)

    def _fill(self, now_s: float) -> None:
        # Another process may have read its clock a moment later, and filled the bucket already.
        if now_s > self.seen_s:
            refilled = self.level + (now_s - self.seen_s) * self.per_minute / _MINUTE_S
            self.level, self.seen_s = min(self.per_minute, refilled), now_s


class LimitUsage:
    """One tenant's use of its limits. This one belongs to a single process; a subclass shares it.

    Read and written inside `with` only.
    """

    __slots__ = ("num_inflight", "num_inflight_beside", "requests", "tokens")

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.num_inflight = 0
        """Requests that this process has accepted and not yet answered."""
        self.num_inflight_beside = 0
        """Requests of the other processes that share the account."""

    def __enter__(self) -> Self:
        """Lock the account: nothing else changes it meanwhile."""
        return self

    def __exit__(self, *_: object) -> None:
        """Store the changes and unlock the account."""

    def drop_ended_processes(self) -> None:
        """Forget the requests of processes that have died."""

    def release(self) -> None:
        """End one request of this process, outside `with`: needs no lock, since only this process writes that
        number."""
        self.num_inflight -= 1


UsageOf = Callable[[str], LimitUsage]
"""Returns the account of a tenant that has limits."""


class LimitedUsage(NamedTuple):
    """Use by a tenant with limits, on this router in this epoch."""

    tenant: str
    epoch: int
    requests: int
    tokens: int
    num_inflight: int


@dataclass(slots=True, kw_only=True)
class _Account:
    """One tenant's account as this process knows it."""

    limits: TenantLimits
    usage: LimitUsage
    is_shared: bool
    """Whether `usage_of` gave the usage, as for every tenant that has limits or had some. Otherwise there is nothing to
    check, take or lock."""
    num_promised: int = 0
    """Continued streams among its requests in flight here."""
    mean_s: float = _PER_REQUEST_S
    """Mean duration of a request."""
    epoch: int = 0
    """Number of times the account restarted after a period without use."""
    requests_taken: int = 0
    tokens_taken: float = 0.0
    """Tokens taken here in this epoch, less refunds."""
    touched_s: float = -math.inf

    def usage_by(self, tenant: str) -> LimitedUsage:
        tokens, num_inflight = round(self.tokens_taken), self.usage.num_inflight
        return LimitedUsage(tenant, self.epoch, self.requests_taken, tokens, num_inflight)

    def note(self, requests: int, tokens: float, now_s: float) -> None:
        """Add to the sums of this process; negative numbers are refunds."""
        if now_s - self.touched_s > RECENT_S and not self.usage.num_inflight:
            self.epoch, self.requests_taken, self.tokens_taken = self.epoch + 1, 0, 0.0
        self.requests_taken += requests
        self.tokens_taken += tokens
        self.touched_s = now_s

    def consume(self, requests: int, tokens: float, now_s: float) -> None:
        """Take from the buckets, on behalf of any process. The caller holds the account."""
        if requests and (bucket := self.requests_bucket(now_s)) is not None:
            bucket.consume(float(requests), now_s)
        if tokens and (bucket := self.tokens_bucket(now_s)) is not None:
            bucket.consume(tokens, now_s)

    def requests_bucket(self, now_s: float) -> TokenBucket | None:
        """Return the bucket of the request limit in force; None without one."""
        if (per_minute := self.limits.requests_per_minute) is None:
            return None
        self.usage.requests = bucket = _fitted(self.usage.requests, per_minute, now_s)
        return bucket

    def tokens_bucket(self, now_s: float) -> TokenBucket | None:
        """Return the bucket of the token limit in force; None without one."""
        if (per_minute := self.limits.tokens_per_minute) is None:
            return None
        self.usage.tokens = bucket = _fitted(self.usage.tokens, per_minute, now_s)
        return bucket


def _fitted(bucket: TokenBucket | None, per_minute: int, now_s: float) -> TokenBucket:
    if bucket is None:
        return TokenBucket.full(per_minute, now_s)
    return bucket if bucket.per_minute == per_minute else bucket.resized(per_minute, now_s)


class RateLimitGrant(Struct, kw_only=True):
    """One request's part of its tenant's limits, until it is returned."""

    tenant: str
    promised: bool
    estimated_tokens: float
    since_s: float
    given_back: bool = False


class RateLimiter:
    """The accounts of all tenants, created when first used."""

    def __init__(
        self,
        config: LimitsConfig,
        *,
        clock: Callable[[], float],
        usage_of: UsageOf = lambda _tenant: LimitUsage(),
    ) -> None:
        """`usage_of`: where the usage of tenants with limits is kept. `clock`: shared by all that use these
        accounts."""
        self._config = config
        self._clock = clock
        self._usage_of = usage_of
        self._accounts: dict[str, _Account] = {}
        self.weight = lru_cache(maxsize=_MAX_WEIGHTS)(self._weight)
        """Returns a tenant's share of a busy cluster. It is asked several times for each request."""
        self.num_elsewhere: Callable[[str], int] = _none_elsewhere
        """Returns how many requests of a tenant routers on other hosts have in flight."""

    def reconfigure(self, config: LimitsConfig) -> None:
        """Use other limits from now on. Earlier usage still counts, and running requests continue."""
        self._config = config
        self.weight.cache_clear()
        for tenant, account in self._accounts.items():
            account.limits = limits = self.limits_for(tenant)
            if _is_limited(limits) and not account.is_shared:
                self._share(tenant, account)

    def limits_for(self, tenant: str) -> TenantLimits:
        """Return a tenant's own limits, or the default."""
        return self._config.tenants.get(tenant, self._config.default)

    def may_use_adapter(self, tenant: str, name: str) -> bool:
        """Whether a tenant may use the adapter of a name. A permission, unlike the limits: a tenant whose entry names
        no adapters has those of the default."""
        own = self.limits_for(tenant).adapters
        patterns = self._config.default.adapters if own is None else own
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)

    def max_concurrent(self, tenant: str) -> int | None:
        """Return the most requests that a tenant may have at once; None without such a limit."""
        return self.limits_for(tenant).concurrent_requests

    def priority(self, tenant: str, wanted: int) -> int:
        """Return the priority that a tenant's request gets: `wanted`, or the tenant's best where that is worse."""
        best = self._config.tenants.get(tenant, self._config.default).best_priority
        if best is None:
            # Where no keys are configured, every caller is the unnamed tenant.
            best = _USUAL_PRIORITY if tenant else wanted
        return max(wanted, best)

    def num_inflight(self, tenant: str) -> int:
        """Count the requests that this router has accepted and not yet answered."""
        return self._account(tenant).usage.num_inflight

    def admit(
        self, tenant: str, estimated_tokens: float, *, promised: bool = False, leaving: int = 0
    ) -> RateLimitGrant:
        """Count one request in; see `admit_call`."""
        return self.admit_call(tenant, [estimated_tokens], promised=promised, leaving=leaving)[0]

    def admit_call(
        self, tenant: str, estimates: Sequence[float], *, promised: bool = False, leaving: int = 0
    ) -> list[RateLimitGrant]:
        """Count in all requests of one client call, by their estimated tokens, or none. `promised`: the call continues
        a stream, whose former run may still be counted somewhere.

        A promised call overdraws the accounts if need be, which later requests then have to wait for, and as many
        streams may continue at a time as requests may run. `leaving`: requests that end when these begin. Raises
        Overloaded that names the limit and when to retry, or InvalidRequest when retrying cannot help.
        """
        account = self._accounts.get(tenant) or self._account(tenant)
        now_s, count, tokens = self._clock(), len(estimates), sum(estimates)
        if account.is_shared:
            if not promised:
                _check_size(account.limits, count)
            elif (most := account.limits.concurrent_requests) is not None and account.num_promised + count > most:
                raise limit_reached("concurrent_requests", most, account.mean_s / most)
            with account.usage as usage:
                if not promised:
                    self._check(tenant, account, estimates, now_s, leaving)
                account.note(count, tokens, now_s)
                account.consume(count, tokens, now_s)
                usage.num_inflight += count
        else:
            account.note(count, tokens, now_s)
            account.usage.num_inflight += count
        account.num_promised += count if promised else 0
        grants = []
        for estimate in estimates:
            grants.append(RateLimitGrant(tenant=tenant, promised=promised, estimated_tokens=estimate, since_s=now_s))
        return grants

    def settle(self, grant: RateLimitGrant, used_tokens: float) -> None:
        """End a request that used `used_tokens`."""
        if not grant.given_back:
            account, now_s = self._accounts[grant.tenant], self._clock()
            account.mean_s += _SMOOTHING * (now_s - grant.since_s - account.mean_s)
            self._give_back(account, grant, 0, used_tokens - grant.estimated_tokens, now_s)

    def cancel(self, grant: RateLimitGrant) -> None:
        """End a request that was refused through no fault of its tenant: it costs nothing."""
        if not grant.given_back:
            self._give_back(self._accounts[grant.tenant], grant, -1, -grant.estimated_tokens, self._clock())

    def usages(self) -> list[LimitedUsage]:
        """Return the usage of tenants with limits that have requests here, or had some recently; the latest first."""
        since_s = self._clock() - RECENT_S
        recent = [
            (account.touched_s, tenant)
            for tenant, account in self._accounts.items()
            if _is_limited(account.limits) and (account.usage.num_inflight or account.touched_s >= since_s)
        ]
        return [self._accounts[tenant].usage_by(tenant) for _, tenant in sorted(recent, reverse=True)]

    def used_elsewhere(self, tenant: str, requests: int, tokens: int) -> None:
        """Deduct from the tenant's account what a router on another host has admitted."""
        account = self._account(tenant)
        with account.usage:
            account.consume(requests, float(tokens), self._clock())

    def _check(self, tenant: str, account: _Account, estimates: Sequence[float], now_s: float, leaving: int) -> None:
        limits, usage, count = account.limits, account.usage, len(estimates)
        most = limits.concurrent_requests
        if most is not None:
            room = most - usage.num_inflight + leaving - self.num_elsewhere(tenant) - count
            if room < usage.num_inflight_beside:
                usage.drop_ended_processes()
            if room < usage.num_inflight_beside:
                raise limit_reached("concurrent_requests", most, account.mean_s / most)
        bucket = account.requests_bucket(now_s)
        if bucket is not None and (wait_s := bucket.wait_s(float(count), now_s)) > 0.0:
            raise limit_reached("requests_per_minute", limits.requests_per_minute, wait_s)
        bucket = account.tokens_bucket(now_s)
        if bucket is not None and (wait_s := bucket.wait_s(sum(estimates), now_s)) > 0.0:
            raise limit_reached("tokens_per_minute", limits.tokens_per_minute, wait_s)

    @staticmethod
    def _give_back(account: _Account, grant: RateLimitGrant, requests: int, tokens: float, now_s: float) -> None:
        grant.given_back = True
        account.note(requests, tokens, now_s)
        account.num_promised -= grant.promised
        limits, usage = account.limits, account.usage
        if limits.tokens_per_minute is not None or (requests and limits.requests_per_minute is not None):
            with usage:
                account.consume(requests, tokens, now_s)
        usage.release()

    def _weight(self, tenant: str) -> float:
        return self.limits_for(tenant).weight

    def _account(self, tenant: str) -> _Account:
        if (account := self._accounts.get(tenant)) is None:
            limits = self.limits_for(tenant)
            account = self._accounts[tenant] = _Account(limits=limits, usage=LimitUsage(), is_shared=False)
            if _is_limited(limits):
                self._share(tenant, account)
        return account

    def _share(self, tenant: str, account: _Account) -> None:
        former, account.usage, account.is_shared = account.usage, self._usage_of(tenant), True
        with account.usage as usage:
            usage.num_inflight = former.num_inflight


def _is_limited(limits: TenantLimits) -> bool:
    bounds = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
    return any(bound is not None for bound in bounds)


def _check_size(limits: TenantLimits, count: int) -> None:
    """Raise InvalidRequest for a call that no waiting can make room for."""
    for name, bound in (
        ("concurrent_requests", limits.concurrent_requests),
        ("requests_per_minute", limits.requests_per_minute),
    ):
        if bound is not None and count > bound:
            raise InvalidRequest(f"{count} prompts: this API key's limit {name} is {bound}", param=name)


def _none_elsewhere(_tenant: str) -> int:
    """Report none, for a router without peers."""
    return 0


def limit_reached(name: str, bound: int | None, wait_s: float) -> Overloaded:
    """Make the refusal of a request beyond one of its tenant's limits."""
    return Overloaded(f"this API key's limit {name} of {bound} is reached", param=name, retry_after_s=max(0.1, wait_s))
