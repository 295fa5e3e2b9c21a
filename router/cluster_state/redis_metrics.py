"""Metrics of this router's use of Redis. Their labels have few values: kinds and verdicts that we define."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.cluster_state.redis_tasks import RouterClusterState


class ClusterStateMetrics(Collector):
    """Exports the cluster state's counters; read at each scrape."""

    def __init__(self, state: RouterClusterState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Collect current gauges, and totals since start."""
        state, counts = self._state, self._state.counts
        up = GaugeMetricFamily("tandem_redis_up", "Whether Redis responds, by use", labels=("use",))
        connects = CounterMetricFamily(
            "tandem_redis_connects", "Connections to Redis that were established", labels=("use",)
        )
        failures = CounterMetricFamily("tandem_redis_failures", "Redis commands that failed", labels=("use",))
        for link in state.links:
            up.add_metric((link.use,), link.is_up)
            connects.add_metric((link.use,), link.connects)
            failures.add_metric((link.use,), link.failures)
        up.add_metric(("share",), state.is_published)
        yield from (up, connects, failures)
        for name, text, label, counter in (
            (
                "tandem_redis_entries",
                "Entries of workers' logs read from Redis, by result",
                "verdict",
                counts.entries,
            ),
            (
                "tandem_redis_bad_entries",
                "Redis entries that were malformed or not authentic, and ignored",
                "kind",
                counts.bad,
            ),
            ("tandem_redis_reloads", "Full states of workers loaded from Redis, by reason", "reason", counts.reloads),
        ):
            family = CounterMetricFamily(name, text, labels=(label,))
            for value, count in counter.items():
                family.add_metric((value,), count)
            yield family
        yield GaugeMetricFamily(
            "tandem_redis_followed_workers", "Workers whose logs in Redis this router follows", state.num_followed
        )
        yield GaugeMetricFamily(
            "tandem_redis_peer_routers", "Other routers whose load is known through Redis", state.num_peers
        )
