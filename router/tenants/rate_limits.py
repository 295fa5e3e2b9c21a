"""What each tenant may ask for: requests and tokens per minute, requests at once. Pure; the caller tells the time.

What other routers give a tenant counts as well, as soon as it is heard of (`router.tenants.shared_rate_limits`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import InvalidRequest, Overloaded

_MINUTE_S = 60.0
_PER_REQUEST_S = 1.0
"""What a tenant at its bound of concurrent requests is told when none of its requests has ended yet."""
_SMOOTHING = 0.2
_USUAL_PRIORITY = 0
"""The best that a key has of which nothing else is said."""
RECENT_S = 2 * _MINUTE_S
"""After so long without use every account is full again, and what was used before concerns nobody."""


class TokenBucket:
    """So many a minute, a minute's worth at once. Settling may put it into debt: then it has to fill up first."""

    def __init__(self, *, per_minute: int, now_s: float) -> None:
        self._per_s = per_minute / _MINUTE_S
        self._capacity = float(per_minute)
        self._level = float(per_minute)
        self._now_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until `amount` may be taken: 0 when it may now. More than it ever holds is given when it is full."""
        self._fill(now_s)
        return max(0.0, (min(amount, self._capacity) - self._level) / self._per_s)

    def consume(self, amount: float, now_s: float) -> None:
        """Take it, into debt if need be; below zero gives back."""
        self._fill(now_s)
        self._level = min(self._capacity, self._level - amount)

    def resized(self, per_minute: int, now_s: float) -> "TokenBucket":
        """Another of a new size, from which as much is missing."""
        self._fill(now_s)
        other = TokenBucket(per_minute=per_minute, now_s=now_s)
        other.consume(self._capacity - self._level, now_s)
        return other

    def _fill(self, now_s: float) -> None:
        self._level = min(self._capacity, self._level + (now_s - self._now_s) * self._per_s)
        self._now_s = now_s


class LimitedUsage(NamedTuple):
    """What a tenant with limits has had here in this epoch."""

    tenant: str
    epoch: int
    requests: int
    tokens: int
    num_inflight: int


@dataclass(slots=True, kw_only=True)
class _Account:
    limits: TenantLimits
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_inflight: int = 0
    num_promised: int = 0
    """Of those."""
    mean_s: float = _PER_REQUEST_S
    """How long a request takes."""
    epoch: int = 0
    """How often it began anew after a while without use."""
    requests_taken: int = 0
    tokens_taken: float = 0.0
    """Here, in this epoch, less what was given back."""
    touched_s: float = -math.inf

    @property
    def is_limited(self) -> bool:
        return any(bound is not None for bound in (self.requests, self.tokens, self.limits.concurrent_requests))

    def usage(self, tenant: str) -> LimitedUsage:
        return LimitedUsage(tenant, self.epoch, self.requests_taken, round(self.tokens_taken), self.num_inflight)

    def consume(self, requests: int, tokens: float, now_s: float) -> None:
        """Use of its own; below zero gives back."""
        if now_s - self.touched_s > RECENT_S and not self.num_inflight:
            self.epoch, self.requests_taken, self.tokens_taken = self.epoch + 1, 0, 0.0
        self.requests_taken += requests
        self.tokens_taken += tokens
        self.touched_s = now_s
        self.use(requests, tokens, now_s)

    def left(self, grant: "RateLimitGrant") -> None:
        """One is over."""
        self.num_inflight -= 1
        self.num_promised -= grant.promised

    def use(self, requests: int, tokens: float, now_s: float) -> None:
        """Use, here or elsewhere."""
        if self.requests is not None and requests:
            self.requests.consume(float(requests), now_s)
        if self.tokens is not None and tokens:
            self.tokens.consume(tokens, now_s)


@dataclass(slots=True, kw_only=True)
class RateLimitGrant:
    """One request's part of its tenant's limits, until it is given back."""

    tenant: str
    promised: bool
    estimated_tokens: float
    since_s: float
    given_back: bool = field(default=False)


class RateLimiter:
    """The accounts of all tenants, made as they first come."""

    def __init__(self, config: LimitsConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.num_elsewhere: Callable[[str], int] = _none_elsewhere
        """Requests of a tenant that other routers have under way."""

    def reconfigure(self, config: LimitsConfig) -> None:
        """Other limits from now on. What was used before still counts, and what runs goes on."""
        self._config = config
        for tenant, account in self._accounts.items():
            limits = account.limits = self.limits_for(tenant)
            account.requests = self._bucket(limits.requests_per_minute, account.requests)
            account.tokens = self._bucket(limits.tokens_per_minute, account.tokens)

    def limits_for(self, tenant: str) -> TenantLimits:
        """A tenant's own limits, or the default."""
        return self._config.tenants.get(tenant, self._config.default)

    def weight(self, tenant: str) -> float:
        """Its share of a busy cluster."""
        return self.limits_for(tenant).weight

    def priority(self, tenant: str, asked: int) -> int:
        """The best that it may have of what it asked for."""
        best = self.limits_for(tenant).best_priority
        if best is None:
            # The nameless tenant is everybody, where no keys are configured.
            best = _USUAL_PRIORITY if tenant else asked
        return max(asked, best)

    def num_inflight(self, tenant: str) -> int:
        """Accepted and not yet ended."""
        return self._account(tenant).num_inflight

    def admit(
        self, tenant: str, estimated_tokens: float, *, promised: bool = False, leaving: int = 0
    ) -> RateLimitGrant:
        """Count a request in; see `admit_call`."""
        return self.admit_call(tenant, [estimated_tokens], promised=promised, leaving=leaving)[0]

    def admit_call(
        self, tenant: str, estimates: Sequence[float], *, promised: bool = False, leaving: int = 0
    ) -> list[RateLimitGrant]:
        """Count in all requests of one client call, by their estimated tokens, or none. `promised`: of a stream that
        goes on, whose former run may still be counted somewhere.

        It puts the accounts into debt if need be, which whatever comes next has to wait for, and as many may go on at a
        time as may run. `leaving`: requests that end when these begin. Raises Overloaded that names the limit and says
        when to come back, InvalidRequest when coming back cannot help.
        """
        account, now_s = self._account(tenant), self._clock()
        if not promised:
            self._check(tenant, account, estimates, now_s, leaving)
        elif (most := account.limits.concurrent_requests) is not None and account.num_promised + len(estimates) > most:
            raise _over("concurrent_requests", most, account.mean_s / most)
        for estimate in estimates:
            account.consume(1, estimate, now_s)
            account.num_inflight += 1
            account.num_promised += promised
        return [
            RateLimitGrant(tenant=tenant, promised=promised, estimated_tokens=estimate, since_s=now_s)
            for estimate in estimates
        ]

    def settle(self, grant: RateLimitGrant, used_tokens: float) -> None:
        """The request has ended and took so many tokens."""
        if grant.given_back:
            return
        grant.given_back = True
        account, now_s = self._account(grant.tenant), self._clock()
        account.mean_s += _SMOOTHING * (now_s - grant.since_s - account.mean_s)
        account.consume(0, used_tokens - grant.estimated_tokens, now_s)
        account.left(grant)

    def cancel(self, grant: RateLimitGrant) -> None:
        """The request was refused after all, for no fault of its tenant: it costs nothing."""
        if grant.given_back:
            return
        grant.given_back = True
        account, now_s = self._account(grant.tenant), self._clock()
        account.consume(-1, -grant.estimated_tokens, now_s)
        account.left(grant)

    def usages(self) -> list[LimitedUsage]:
        """Of tenants with limits that have requests here, or had some lately; the latest first."""
        since_s = self._clock() - RECENT_S
        recent = [
            (account.touched_s, tenant)
            for tenant, account in self._accounts.items()
            if account.is_limited and (account.num_inflight or account.touched_s >= since_s)
        ]
        return [self._accounts[tenant].usage(tenant) for _, tenant in sorted(recent, reverse=True)]

    def used_elsewhere(self, tenant: str, requests: int, tokens: int) -> None:
        """Another router has given a tenant so much more."""
        self._account(tenant).use(requests, float(tokens), self._clock())

    def _check(self, tenant: str, account: _Account, estimates: Sequence[float], now_s: float, leaving: int) -> None:
        limits, count = account.limits, len(estimates)
        for name, bound in (
            ("concurrent_requests", limits.concurrent_requests),
            ("requests_per_minute", limits.requests_per_minute),
        ):
            if bound is not None and count > bound:
                raise InvalidRequest(f"{count} prompts: this API key's limit {name} is {bound}", param=name)
        most = limits.concurrent_requests
        if most is not None and account.num_inflight - leaving + self.num_elsewhere(tenant) + count > most:
            raise _over("concurrent_requests", most, account.mean_s / most)
        if account.requests is not None and (wait_s := account.requests.wait_s(float(count), now_s)) > 0.0:
            raise _over("requests_per_minute", limits.requests_per_minute, wait_s)
        if account.tokens is not None and (wait_s := account.tokens.wait_s(sum(estimates), now_s)) > 0.0:
            raise _over("tokens_per_minute", limits.tokens_per_minute, wait_s)

    def _account(self, tenant: str) -> _Account:
        if (account := self._accounts.get(tenant)) is None:
            limits = self.limits_for(tenant)
            account = self._accounts[tenant] = _Account(
                limits=limits,
                requests=self._bucket(limits.requests_per_minute),
                tokens=self._bucket(limits.tokens_per_minute),
            )
        return account

    def _bucket(self, per_minute: int | None, former: TokenBucket | None = None) -> TokenBucket | None:
        if per_minute is None:
            return None
        now_s = self._clock()
        return TokenBucket(per_minute=per_minute, now_s=now_s) if former is None else former.resized(per_minute, now_s)


def _none_elsewhere(_tenant: str) -> int:
    """Of a router that is alone."""
    return 0


def _over(name: str, bound: int | None, wait_s: float) -> Overloaded:
    return Overloaded(f"this API key's limit {name} of {bound} is reached", param=name, retry_after_s=max(0.1, wait_s))
