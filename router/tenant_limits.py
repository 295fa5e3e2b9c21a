"""What each tenant may ask for: requests and tokens per minute, requests at once. Pure; the caller tells the time."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.admission_config import LimitsConfig, TenantLimits
from tandem.errors import Overloaded

_MINUTE_S = 60.0
_PER_REQUEST_S = 1.0
"""What a tenant at its bound of concurrent requests is told when none of its requests has ended yet."""
_SMOOTHING = 0.2


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

    def take(self, amount: float, now_s: float) -> None:
        """Take it, into debt if need be; below zero gives back."""
        self._fill(now_s)
        self._level = min(self._capacity, self._level - amount)

    def _fill(self, now_s: float) -> None:
        self._level = min(self._capacity, self._level + (now_s - self._now_s) * self._per_s)
        self._now_s = now_s


@dataclass(slots=True, kw_only=True)
class _Account:
    limits: TenantLimits
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_inflight: int = 0
    mean_s: float = _PER_REQUEST_S
    """How long a request takes."""


@dataclass(slots=True, kw_only=True)
class Grant:
    """One request's part of its tenant's limits, until it is given back."""

    tenant: str
    estimated_tokens: float
    since_s: float
    given_back: bool = field(default=False)


class Limiter:
    """The accounts of all tenants, made as they first come."""

    def __init__(self, config: LimitsConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def of(self, tenant: str) -> TenantLimits:
        """A tenant's own limits, or the default."""
        return self._config.tenants.get(tenant, self._config.default)

    def weight(self, tenant: str) -> float:
        """Its share of a busy cluster."""
        return self.of(tenant).weight

    def priority(self, tenant: str, asked: int) -> int:
        """The best that it may have of what it asked for."""
        best = self.of(tenant).best_priority
        return asked if best is None else max(asked, best)

    def num_inflight(self, tenant: str) -> int:
        """Accepted and not yet ended."""
        return self._account(tenant).num_inflight

    def admit(self, tenant: str, estimated_tokens: float, *, promised: bool = False) -> Grant:
        """Count a request in. `promised`: one that goes on is counted and never refused.

        Raises Overloaded that names the limit and says when to come back.
        """
        account, now_s = self._account(tenant), self._clock()
        if not promised:
            self._check(account, estimated_tokens, now_s)
        account.num_inflight += 1
        if account.requests is not None and not promised:
            account.requests.take(1.0, now_s)
        if account.tokens is not None:
            account.tokens.take(estimated_tokens, now_s)
        return Grant(tenant=tenant, estimated_tokens=estimated_tokens, since_s=now_s)

    def settle(self, grant: Grant, used_tokens: float) -> None:
        """The request has ended and took so many tokens."""
        if grant.given_back:
            return
        grant.given_back = True
        account, now_s = self._account(grant.tenant), self._clock()
        account.num_inflight -= 1
        account.mean_s += _SMOOTHING * (now_s - grant.since_s - account.mean_s)
        if account.tokens is not None:
            account.tokens.take(used_tokens - grant.estimated_tokens, now_s)

    def cancel(self, grant: Grant) -> None:
        """The request was refused after all, for no fault of its tenant: it costs nothing."""
        if grant.given_back:
            return
        grant.given_back = True
        account, now_s = self._account(grant.tenant), self._clock()
        account.num_inflight -= 1
        if account.requests is not None:
            account.requests.take(-1.0, now_s)
        if account.tokens is not None:
            account.tokens.take(-grant.estimated_tokens, now_s)

    def _check(self, account: _Account, estimated_tokens: float, now_s: float) -> None:
        limits = account.limits
        most = limits.concurrent_requests
        if most is not None and account.num_inflight >= most:
            raise _over("concurrent_requests", most, account.mean_s / most)
        if account.requests is not None and (wait_s := account.requests.wait_s(1.0, now_s)) > 0.0:
            raise _over("requests_per_minute", limits.requests_per_minute, wait_s)
        if account.tokens is not None and (wait_s := account.tokens.wait_s(estimated_tokens, now_s)) > 0.0:
            raise _over("tokens_per_minute", limits.tokens_per_minute, wait_s)

    def _account(self, tenant: str) -> _Account:
        if (account := self._accounts.get(tenant)) is None:
            limits = self.of(tenant)
            account = self._accounts[tenant] = _Account(
                limits=limits,
                requests=self._bucket(limits.requests_per_minute),
                tokens=self._bucket(limits.tokens_per_minute),
            )
        return account

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket(per_minute=per_minute, now_s=self._clock())


def _over(name: str, bound: int | None, wait_s: float) -> Overloaded:
    return Overloaded(f"this API key's limit {name} of {bound} is reached", param=name, retry_after_s=max(0.1, wait_s))
