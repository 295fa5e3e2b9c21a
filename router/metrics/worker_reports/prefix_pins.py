"""Pinned prefixes, as workers count them: totals that are shown and never added up here."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import WorkerSnapshot

_LABELS = ("worker", "role")
_EVENTS = ("made", "renewed", "refused", "gave_way", "expired")


class PinMetrics(Collector):
    """Shows what workers last said; a worker that left is no longer shown."""

    def __init__(self) -> None:
        self._shown: tuple[WorkerSnapshot, ...] = ()

    def show(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace what is shown."""
        self._shown = tuple(snapshots)

    def collect(self) -> Iterable[Metric]:
        prefixes = GaugeMetricFamily("tandem_worker_pinned_prefixes", "Pinned prefixes", labels=_LABELS)
        blocks = GaugeMetricFamily("tandem_worker_pinned_blocks", "KV blocks held by pinned prefixes", labels=_LABELS)
        limit = GaugeMetricFamily(
            "tandem_worker_pinned_blocks_limit",
            "Maximum number of KV blocks that pinned prefixes may hold",
            labels=_LABELS,
        )
        events = CounterMetricFamily(
            "tandem_worker_pinned_prefix_events",
            "Pin events: made, renewed, refused, gave_way (evicted for another pin or a large request), expired",
            labels=(*_LABELS, "event"),
        )
        for snapshot in self._shown:
            worker = (snapshot.info.key.worker_id, snapshot.info.role.value)
            pins = snapshot.load.pins
            prefixes.add_metric(worker, pins.num_pins)
            blocks.add_metric(worker, pins.num_blocks)
            limit.add_metric(worker, pins.max_blocks)
            for event in _EVENTS:
                events.add_metric((*worker, event), getattr(pins, event))
        yield from (prefixes, blocks, limit, events)
