"""How workers fare in publishing to Redis, as they count it: totals that are shown and never added up here."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import WorkerSnapshot


class PublishMetrics(Collector):
    """How workers fare in publishing, as they report it."""

    def __init__(self) -> None:
        self._snapshots: tuple[WorkerSnapshot, ...] = ()

    def show(self, snapshots: tuple[WorkerSnapshot, ...]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Of workers that publish."""
        labels = ("worker",)
        up = GaugeMetricFamily("tandem_worker_redis_up", "Whether Redis accepts the worker's entries", labels=labels)
        lag = GaugeMetricFamily(
            "tandem_worker_redis_lag_seconds",
            "Age of the oldest cache change that the worker has not yet published",
            labels=labels,
        )
        connects = CounterMetricFamily(
            "tandem_worker_redis_connects", "Connections to Redis that the worker established", labels=labels
        )
        entries = CounterMetricFamily(
            "tandem_worker_redis_entries", "Entries that the worker wrote to Redis", labels=labels
        )
        states = CounterMetricFamily(
            "tandem_worker_redis_states", "Full states that the worker wrote to Redis", labels=labels
        )
        for snapshot in self._snapshots:
            if (report := snapshot.load.board) is not None:
                name = (snapshot.info.key.worker_id,)
                up.add_metric(name, report.is_up)
                lag.add_metric(name, report.lag_s)
                connects.add_metric(name, report.connects)
                entries.add_metric(name, report.entries)
                states.add_metric(name, report.states)
        yield from (up, lag, connects, entries, states)
