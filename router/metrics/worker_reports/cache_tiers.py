"""The cache tiers below workers' pools, as workers count them: totals that are shown and never added up here."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import CacheTierLoad, WorkerSnapshot

_LABELS = ("worker", "role", "tier")
_COUNTERS: Mapping[str, str] = {
    "hits": "Prompt blocks found in a tier and in no faster one",
    "misses": "Full prompt blocks looked up in a tier and not found",
    "stores": "Blocks stored in a tier",
    "evictions": "Blocks evicted from a tier",
    "stored_bytes": "Bytes written to a tier",
    "loaded_bytes": "Bytes read from a tier",
    "dropped": "Blocks that could not be stored in a tier: no room, or a slow or full disk",
    "damaged": "Stored copies discarded because they were damaged, truncated or of another cache",
    "late": "Requests that stopped waiting for a tier and computed the blocks instead",
}
_SECONDS: Mapping[str, str] = {
    "store_s": "tandem_worker_cache_store_seconds",
    "load_s": "tandem_worker_cache_load_seconds",
}


class TierMetrics(Collector):
    """Shows what workers last said; a worker that left is no longer shown."""

    def __init__(self) -> None:
        self._shown: list[tuple[tuple[str, str, str], CacheTierLoad]] = []

    def show(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace what is shown."""
        self._shown = [
            ((snapshot.info.key.worker_id, snapshot.info.role.value, tier.tier), tier)
            for snapshot in snapshots
            for tier in snapshot.load.cache_tiers
        ]

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("tandem_worker_cache_blocks", "Cached blocks by tier", labels=_LABELS)
        room = GaugeMetricFamily("tandem_worker_cache_capacity_blocks", "Capacity in blocks by tier", labels=_LABELS)
        for labels, tier in self._shown:
            blocks.add_metric(labels, tier.num_blocks)
            room.add_metric(labels, tier.capacity_blocks)
        yield from (blocks, room)
        for field, text in _COUNTERS.items():
            yield self._counter(f"tandem_worker_cache_{field}", text, field)
        for field, name in _SECONDS.items():
            yield self._counter(name, "Seconds that just those bytes took", field)

    def _counter(self, name: str, text: str, field: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for labels, tier in self._shown:
            family.add_metric(labels, getattr(tier, field))
        return family
