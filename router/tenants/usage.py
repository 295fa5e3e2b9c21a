"""Each tenant's usage since the router started: a bounded account, and the sum of several processes' accounts. Pure."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import orjson
from msgspec.structs import asdict

from router.tenants.prices import PriceTable, Spent

MOST_TENANTS = 1000
"""Tenants beyond this number are counted together, under OTHERS."""
OTHERS = "(others)"
"""Name for all further tenants; no tenant can have it, since brackets are not allowed."""


class TenantUsage:
    """The usage account of one process."""

    def __init__(self, prices: PriceTable | None = None, *, since_s: float = 0.0, most: int = MOST_TENANTS) -> None:
        """`since_s`: Unix time at which the account begins."""
        self.prices = prices or PriceTable()
        self.since_s = since_s
        self._most = most
        self._spent: dict[str, Spent] = {}
        self._others: Callable[[], Awaitable[list[bytes]]] | None = None
        self.label: Callable[[str], str] = str
        """Returns a tenant's label, as in metrics."""

    def add(self, tenant: str, spent: Spent) -> None:
        """Add a request that has ended."""
        if tenant not in self._spent and len(self._spent) >= self._most:
            tenant = OTHERS
        before = self._spent.get(tenant)
        self._spent[tenant] = spent if before is None else before.plus(spent)

    @property
    def spent(self) -> Mapping[str, Spent]:
        """Usage by tenant, in this process."""
        return self._spent

    def collect_with(self, others: Callable[[], Awaitable[list[bytes]]]) -> None:
        """Merge in the accounts that `others` returns: those of the other processes."""
        self._others = others

    async def collect(self) -> bytes:
        """Return the serialised account of all processes, for `object`."""
        return self.render() if self._others is None else merge([self.render(), *await self._others()])

    def render(self) -> bytes:
        """Serialise the account, for `merge` and `object`."""
        return orjson.dumps({"since_s": self.since_s, "tenants": {name: asdict(s) for name, s in self._spent.items()}})

    def object(self, text: bytes, *, only: str | None) -> dict[str, Any]:
        """Return a rendered or merged account as clients see it. `only`: the one tenant to show; None: all."""
        account = orjson.loads(text)
        accounts = {name: Spent(**spent) for name, spent in account["tenants"].items() if only in (None, name)}
        if only is not None:
            accounts.setdefault(only, Spent())
        total = Spent()
        for spent in accounts.values():
            total = total.plus(spent)
        return {
            "object": "usage",
            "since": int(account["since_s"]),
            "currency": self.prices.currency,
            "data": [{"tenant": self.label(name), **self._shown(spent)} for name, spent in sorted(accounts.items())],
            "total": self._shown(total),
        }

    def _shown(self, spent: Spent) -> dict[str, Any]:
        return {
            **{name: round(value, 6) for name, value in asdict(spent).items()},
            "cost": round(self.prices.amount(spent), 9),
            "retry_amplification": round(spent.retry_amplification, 6),
            "hit_fraction": round(spent.hit_fraction, 6),
        }


def merge(texts: Iterable[bytes]) -> bytes:
    """Sum several processes' accounts, over all their tenants. Raises ValueError for an invalid one."""
    accounts = [orjson.loads(text) for text in texts]
    whole = TenantUsage(since_s=min(account["since_s"] for account in accounts))
    for account in accounts:
        for name, spent in account["tenants"].items():
            whole.add(name, _spent(spent))
    return whole.render()


def _spent(values: Mapping[str, Any]) -> Spent:
    names = set(Spent.__struct_fields__)
    if values.keys() != names:
        raise ValueError("another version's account")
    return Spent(**values)
