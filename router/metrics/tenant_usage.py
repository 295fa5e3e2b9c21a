"""What tenants spent, for /metrics: the book behind /v1/usage, under the labels of all metrics that name tenants."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics.tenant_labels import TenantLabels
from router.tenants.prices import Spent
from router.tenants.usage import TenantUsage


class UsageMetrics(Collector):
    """Read from the book at each scrape."""

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
            label = self._labels.of(tenant)
            shown[label] = shown.get(label, Spent()).plus(spent)
        return shown
