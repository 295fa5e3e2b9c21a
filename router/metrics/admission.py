"""Admission's metrics: waiting requests, refusals by reason, service by tenant."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.counts import Rejection, TenantCounts
from router.admission.fair_admission import FairAdmission
from router.metrics.tenants import TenantLabels


class AdmissionMetrics(Collector):
    """Exports admission's counts at each scrape."""

    def __init__(self, admission: FairAdmission, labels: TenantLabels) -> None:
        """`labels`: shared by all metrics that have tenants as labels."""
        self._admission = admission
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families with their current figures."""
        admission, counts = self._admission, self._admission.counts
        yield from self._line()
        yield _gauge("tandem_queue_oldest_seconds", "Waiting time of the oldest queued request", admission.oldest_s())
        waited = CounterMetricFamily(
            "tandem_queue_wait_seconds",
            "Total waiting time of the requests that left the router's queue to be dispatched",
        )
        waited.add_metric((), counts.waited_s)
        yield waited
        turns = CounterMetricFamily("tandem_queue_turns", "Requests that left the router's queue to be dispatched")
        turns.add_metric((), counts.num_turns)
        yield turns
        rejected = CounterMetricFamily(
            "tandem_rejections", "Requests rejected before they were dispatched", labels=("reason",)
        )
        for reason in Rejection:
            rejected.add_metric((reason.value,), counts.rejections[reason])
        yield rejected
        yield from self._tenants(self._shown(counts.tenants))

    def _line(self) -> Iterable[Metric]:
        text = "Requests in the router's queue, by the pool that lacks capacity"
        requests = GaugeMetricFamily("tandem_queue_requests", text, labels=("lacks",))
        tokens = GaugeMetricFamily(
            "tandem_queue_tokens",
            "Prompt tokens of the requests in the router's queue, by the pool that lacks capacity",
            labels=("lacks",),
        )
        for lack, held in self._admission.held().items():
            requests.add_metric((lack.value,), held.num_requests)
            tokens.add_metric((lack.value,), held.num_tokens)
        yield from (requests, tokens)
        text = "Choices at the head of the queue that no decode worker has room for"
        yield _gauge("tandem_refused_choices", text, self._admission.num_refused)

    def _tenants(self, tenants: Mapping[str, TenantCounts]) -> Iterable[Metric]:
        requests = CounterMetricFamily("tandem_tenant_requests", "Requests that were run", labels=("tenant",))
        rejected = CounterMetricFamily(
            "tandem_tenant_rejections", "Requests rejected before they were dispatched", labels=("tenant",)
        )
        tokens = CounterMetricFamily(
            "tandem_tenant_tokens", "Prompt and completion tokens of requests that were run", labels=("tenant", "kind")
        )
        for tenant, counts in tenants.items():
            requests.add_metric((tenant,), counts.requests)
            rejected.add_metric((tenant,), counts.rejected)
            tokens.add_metric((tenant, "input"), counts.input_tokens)
            tokens.add_metric((tenant, "output"), counts.output_tokens)
        yield from (requests, rejected, tokens)

    def _shown(self, tenants: Mapping[str, TenantCounts]) -> dict[str, TenantCounts]:
        shown: dict[str, TenantCounts] = {}
        for tenant, counts in tenants.items():
            sums = shown.setdefault(self._labels.label_for(tenant), TenantCounts())
            sums.requests += counts.requests
            sums.rejected += counts.rejected
            sums.input_tokens += counts.input_tokens
            sums.output_tokens += counts.output_tokens
        return shown


def _gauge(name: str, text: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric((), value)
    return gauge
