"""Tenants in metrics: their labels, bounded in number and never a client's own text, and their usage. Pure."""

import re
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.tenants.prices import Spent
from router.tenants.usage import OTHERS, TenantUsage

MAX_TENANTS = 1000
"""Bound on label values; further tenants share the label `other`."""
_OTHER, _DEFAULT, _NAMELESS = "other", "default", "key-"
_NAMED = "tenant:"
"""Prefix of tenants' names that could be mistaken for special labels; no tenant's name has a colon."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHOWN_CHARS = 8


def _looks_nameless(tenant: str) -> bool:
    """Recognise unnamed keys without access to them, by the pattern with which `router.access.api_keys` names them."""
    return _DIGEST.fullmatch(tenant) is not None


class TenantLabels:
    """The labels of tenants; a tenant keeps its first label."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._labels: dict[str, str] = {}
        self.is_nameless: Callable[[str], bool] = _looks_nameless
        """Returns whether a tenant's name is a key's digest, because the key has no name."""

    def label_for(self, tenant: str) -> str:
        """Return the tenant's label; for a key without a name, the beginning of its digest."""
        if (label := self._labels.get(tenant)) is None:
            if len(self._labels) >= self._most or tenant == OTHERS:
                return _OTHER
            label = self._labels[tenant] = self.label(tenant)
        return label

    def label(self, tenant: str) -> str:
        """Make a label that no other tenant has; `label_for` assigns it to the first tenants."""
        if not tenant:
            return _DEFAULT
        if tenant == OTHERS:
            return _OTHER
        if self.is_nameless(tenant):
            return f"{_NAMELESS}{tenant[:_SHOWN_CHARS]}"
        is_ours = tenant in (_OTHER, _DEFAULT) or tenant.startswith(_NAMELESS)
        return f"{_NAMED}{tenant}" if is_ours else tenant


class UsageMetrics(Collector):
    """Exports the usage accounts at each scrape."""

    def __init__(self, usage: TenantUsage, labels: TenantLabels) -> None:
        self._usage = usage
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        cost = CounterMetricFamily(
            "tandem_tenant_cost", "Cost by the `prices` section, in its currency", labels=("tenant", "currency")
        )
        seconds = CounterMetricFamily(
            "tandem_tenant_seconds", "Worker time in seconds, by activity", labels=("tenant", "kind")
        )
        memory = CounterMetricFamily(
            "tandem_tenant_kv_byte_seconds", "KV bytes held, multiplied by seconds", labels=("tenant",)
        )
        cached = CounterMetricFamily(
            "tandem_tenant_cached_tokens", "Prompt tokens served from a cache", labels=("tenant",)
        )
        prices = self._usage.prices
        for tenant, spent in self._shown().items():
            cost.add_metric((tenant, prices.currency), prices.amount(spent))
            seconds.add_metric((tenant, "prefill"), spent.prefill_s)
            seconds.add_metric((tenant, "decode"), spent.decode_s)
            memory.add_metric((tenant,), spent.kv_byte_s)
            cached.add_metric((tenant,), spent.cached_tokens)
        yield from (cost, seconds, memory, cached)

    def _shown(self) -> dict[str, Spent]:
        shown: dict[str, Spent] = {}
        for tenant, spent in self._usage.spent.items():
            label = self._labels.label_for(tenant)
            shown[label] = shown.get(label, Spent()).plus(spent)
        return shown
