"""Metrics that workers report: KV transfers, cache tiers, pinned prefixes, adapters, Redis. Their totals are exported
unchanged, never added up.

A worker's totals begin at 0 with its process, so they never fall while it lives; a restart is a counter reset, as
Prometheus handles it. A worker that left is no longer exported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import (
    AdapterReport,
    CacheTierLoad,
    TransferEnds,
    TransferReport,
    TransferSide,
    WorkerSnapshot,
)

_WORKER = ("worker", "role")
_SIDE = (*_WORKER, "direction")
_ENDS = (*_SIDE, "kind", "transport", "outcome")

_END_COUNTERS: Mapping[str, tuple[str, str]] = {
    "count": (
        "tandem_worker_transfers",
        "Transfer attempts that ended, by outcome; handoff: a prompt's KV, fetch: a cached prefix",
    ),
    "num_bytes": ("tandem_worker_transfer_bytes", "KV bytes on the wire of ended transfer attempts"),
    "seconds": (
        "tandem_worker_transfer_seconds",
        "Time spent writing those bytes, by the sender's clock; writes may overlap",
    ),
    "chunks": ("tandem_worker_transfer_chunks", "KV chunks of ended transfer attempts; each has one checksum"),
    "damaged_chunks": (
        "tandem_worker_transfer_damaged_chunks",
        "Chunks that failed their checksum and were resent; more than a few indicate a bad link",
    ),
}
_ALERT_OUTCOMES, _ALERT_FIGURES = ("failed", "expired"), ("count", "damaged_chunks")
"""Outcomes and figures that alerts use."""
_SIDE_COUNTERS: Mapping[str, tuple[str, str]] = {
    "started": (
        "tandem_worker_transfers_started",
        "Transfer attempts started; minus those that ended, the number under way",
    ),
    "bad_messages": (
        "tandem_worker_transfer_bad_messages",
        "Messages from peers that were ignored because they were malformed or addressed to another process",
    ),
}
_SIDE_GAUGES: Mapping[str, tuple[str, str]] = {
    "live": ("tandem_worker_transfers_live", "Open transfer attempts, quarantined ones included"),
    "bytes_per_s": (
        "tandem_worker_transfer_rate_bytes_per_second",
        "Measured rate of one write, averaged over recent chunks; 0 if not measured yet",
    ),
}
_BLOCK_STATES: Mapping[str, str] = {
    "pinned_blocks": "pinned",
    "leased_blocks": "leased",
    "quarantined_blocks": "quarantined",
}
_FETCHES: Mapping[str, str] = {
    "fetches_completed": "completed",
    "fetches_failed": "failed",
    "fetches_declined": "declined",
}
_WORKER_COUNTERS: Mapping[str, tuple[str, str]] = {
    "fetches_started": ("tandem_worker_prefix_fetches_started", "Prefix fetches from peers that the worker started"),
    "fetched_tokens": ("tandem_worker_prefix_fetched_tokens", "Prompt tokens fetched from peers instead of computed"),
    "lent_tokens": (
        "tandem_worker_prefix_lent_tokens",
        "Prompt tokens of cached prefixes that the worker sent to peers",
    ),
}


_INHERITED: Mapping[str, tuple[str, str]] = {
    "num_blocks": (
        "tandem_worker_inherited_blocks",
        "Cached blocks offered by stopping workers, by outcome: moved, failed, held (already here), computed (cheaper "
        "than moving), no_room, no_time",
    ),
    "num_bytes": (
        "tandem_worker_inherited_bytes",
        "Size of the cached blocks offered by stopping workers, in this worker's format, by outcome",
    ),
}


class _Shown(NamedTuple):
    labels: tuple[str, str]
    report: TransferReport


class TransferMetrics(Collector):
    """Exports workers' last transfer reports."""

    def __init__(self) -> None:
        self._shown: list[_Shown] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace the reports to export."""
        self._shown = [
            _Shown((snapshot.info.key.worker_id, snapshot.info.role.value), report)
            for snapshot in snapshots
            if (report := snapshot.load.transfers) is not None
        ]

    def collect(self) -> Iterable[Metric]:
        yield from self._ended()
        for field, (name, text) in _SIDE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_SIDE)
            for labels, side in self._sides():
                counter.add_metric(labels, getattr(side, field))
            yield counter
        for field, (name, text) in _SIDE_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_SIDE)
            for labels, side in self._sides():
                gauge.add_metric(labels, getattr(side, field))
            yield gauge
        for field, (name, text) in _WORKER_COUNTERS.items():
            total = CounterMetricFamily(name, text, labels=_WORKER)
            for shown in self._shown:
                total.add_metric(shown.labels, getattr(shown.report, field))
            yield total
        for field, (name, text) in _INHERITED.items():
            migrated = CounterMetricFamily(name, text, labels=(*_WORKER, "outcome"))
            for shown in self._shown:
                for blocks in shown.report.inherited:
                    migrated.add_metric((*shown.labels, blocks.outcome), getattr(blocks, field))
            yield migrated
        yield from (self._blocks(), self._exports(), self._fetches())

    def _sides(self) -> Iterator[tuple[tuple[str, ...], TransferSide]]:
        for shown in self._shown:
            for side in shown.report.sides:
                yield (*shown.labels, side.direction), side

    def _ends(self) -> Iterator[tuple[tuple[str, ...], TransferEnds]]:
        for labels, side in self._sides():
            for ends in side.ended:
                yield (*labels, ends.kind, ends.transport, ends.outcome), ends

    def _ended(self) -> Iterator[Metric]:
        for field, (name, text) in _END_COUNTERS.items():
            ended = CounterMetricFamily(name, text, labels=_ENDS)
            for labels, ends in self._ends():
                ended.add_metric(labels, getattr(ends, field))
            for labels in self._not_yet() if field in _ALERT_FIGURES else ():
                ended.add_metric(labels, 0.0)
            yield ended

    def _not_yet(self) -> Iterator[tuple[str, ...]]:
        """Yield outcomes that have not occurred yet, so that a rate also sees the first one."""
        seen = {labels for labels, _ in self._ends()}
        for *where, _ in sorted({(*labels[:-1], "") for labels in seen}):
            yield from ((*where, outcome) for outcome in _ALERT_OUTCOMES if (*where, outcome) not in seen)

    def _blocks(self) -> Metric:
        text = (
            "KV blocks held by transfers: pinned (sources being read), leased (destinations that a peer may write "
            "to), quarantined (leased ones whose writer failed and might still write)"
        )
        gauge = GaugeMetricFamily("tandem_worker_transfer_blocks", text, labels=(*_WORKER, "state"))
        for shown in self._shown:
            for field, state in _BLOCK_STATES.items():
                gauge.add_metric((*shown.labels, state), getattr(shown.report, field))
        return gauge

    def _exports(self) -> Metric:
        text = "Open sending attempts: prompts being handed off, and prefixes that peers fetch"
        gauge = GaugeMetricFamily("tandem_worker_transfer_exports", text, labels=(*_WORKER, "kind"))
        for shown in self._shown:
            sent = next((side.live for side in shown.report.sides if side.direction == "sent"), 0)
            gauge.add_metric((*shown.labels, "handoff"), max(0, sent - shown.report.loans))
            gauge.add_metric((*shown.labels, "fetch"), shown.report.loans)
        return gauge

    def _fetches(self) -> Metric:
        text = (
            "Prefix fetches by outcome: completed, failed (what arrived is kept, the rest computed), declined "
            "(already here, or cheaper to compute)"
        )
        counter = CounterMetricFamily("tandem_worker_prefix_fetches", text, labels=(*_WORKER, "outcome"))
        for shown in self._shown:
            for field, outcome in _FETCHES.items():
                counter.add_metric((*shown.labels, outcome), getattr(shown.report, field))
        return counter


_TIER = ("worker", "role", "tier")
_TIER_COUNTERS: Mapping[str, str] = {
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
_TIER_SECONDS = {
    "store_s": ("tandem_worker_cache_store_seconds", "Seconds spent storing blocks in a tier"),
    "load_s": ("tandem_worker_cache_load_seconds", "Seconds spent loading blocks from a tier"),
}


class TierMetrics(Collector):
    """Exports workers' last tier reports; a worker that left is no longer exported."""

    def __init__(self) -> None:
        self._shown: list[tuple[tuple[str, str, str], CacheTierLoad]] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace the reports to export."""
        self._shown = [
            ((snapshot.info.key.worker_id, snapshot.info.role.value, tier.tier), tier)
            for snapshot in snapshots
            for tier in snapshot.load.cache_tiers
        ]

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("tandem_worker_cache_blocks", "Cached blocks by tier", labels=_TIER)
        room = GaugeMetricFamily("tandem_worker_cache_capacity_blocks", "Capacity in blocks by tier", labels=_TIER)
        for labels, tier in self._shown:
            blocks.add_metric(labels, tier.num_blocks)
            room.add_metric(labels, tier.capacity_blocks)
        yield from (blocks, room)
        for field, text in _TIER_COUNTERS.items():
            yield self._counter(f"tandem_worker_cache_{field}", text, field)
        for field, (name, text) in _TIER_SECONDS.items():
            yield self._counter(name, text, field)

    def _counter(self, name: str, text: str, field: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_TIER)
        for labels, tier in self._shown:
            family.add_metric(labels, getattr(tier, field))
        return family


_PIN_EVENTS = ("made", "renewed", "refused", "gave_way", "expired")


class PinMetrics(Collector):
    """Exports workers' last pin reports; a worker that left is no longer exported."""

    def __init__(self) -> None:
        self._shown: tuple[WorkerSnapshot, ...] = ()

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace the reports to export."""
        self._shown = tuple(snapshots)

    def collect(self) -> Iterable[Metric]:
        prefixes = GaugeMetricFamily("tandem_worker_pinned_prefixes", "Pinned prefixes", labels=_WORKER)
        blocks = GaugeMetricFamily("tandem_worker_pinned_blocks", "KV blocks held by pinned prefixes", labels=_WORKER)
        limit = GaugeMetricFamily(
            "tandem_worker_pinned_blocks_limit",
            "Maximum number of KV blocks that pinned prefixes may hold",
            labels=_WORKER,
        )
        events = CounterMetricFamily(
            "tandem_worker_pinned_prefix_events",
            "Pin events: made, renewed, refused, gave_way (evicted for another pin or a large request), expired",
            labels=(*_WORKER, "event"),
        )
        for snapshot in self._shown:
            worker = (snapshot.info.key.worker_id, snapshot.info.role.value)
            pins = snapshot.load.pins
            prefixes.add_metric(worker, pins.num_pins)
            blocks.add_metric(worker, pins.num_blocks)
            limit.add_metric(worker, pins.max_blocks)
            for event in _PIN_EVENTS:
                events.add_metric((*worker, event), getattr(pins, event))
        yield from (prefixes, blocks, limit, events)


_ADAPTER_COUNTERS: Mapping[str, tuple[str, str]] = {
    "loads": ("tandem_worker_adapter_loads", "LoRA adapters that the worker loaded"),
    "evictions": ("tandem_worker_adapter_evictions", "LoRA adapters that made room for others"),
    "failures": (
        "tandem_worker_adapter_failures",
        "Loads that failed: missing or other files, or ones that do not fit the model or its memory",
    ),
    "load_seconds": (
        "tandem_worker_adapter_load_seconds",
        "Seconds from the beginning of reading an adapter to its use, of all loads",
    ),
}
_ADAPTER_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_resident": ("tandem_worker_adapters", "LoRA adapters that the worker has loaded"),
    "num_waiting": ("tandem_worker_adapter_waiting", "Requests that wait until their LoRA adapter is loaded"),
    "held_bytes": ("tandem_worker_adapter_bytes", "Memory of the loaded adapters, of one rank"),
    "capacity_bytes": ("tandem_worker_adapter_capacity_bytes", "Memory for adapters, of one rank"),
}


class AdapterLoadMetrics(Collector):
    """Exports workers' reports on loading adapters; nothing for workers that take none."""

    def __init__(self) -> None:
        self._shown: list[tuple[tuple[str, str], AdapterReport]] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace the reports to export."""
        self._shown = [
            ((snapshot.info.key.worker_id, snapshot.info.role.value), report)
            for snapshot in snapshots
            if (report := snapshot.load.adapters) is not None
        ]

    def collect(self) -> Iterable[Metric]:
        for figures, kind in ((_ADAPTER_COUNTERS, CounterMetricFamily), (_ADAPTER_GAUGES, GaugeMetricFamily)):
            for field, (name, text) in figures.items():
                family = kind(name, text, labels=_WORKER)
                for labels, report in self._shown:
                    family.add_metric(labels, getattr(report, field))
                yield family


class PublishMetrics(Collector):
    """Exports workers' reports on publishing in Redis."""

    def __init__(self) -> None:
        self._snapshots: tuple[WorkerSnapshot, ...] = ()

    def update(self, snapshots: tuple[WorkerSnapshot, ...]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Collect the reports of workers that publish."""
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
            if (report := snapshot.load.redis_publishing) is not None:
                name = (snapshot.info.key.worker_id,)
                up.add_metric(name, report.is_up)
                lag.add_metric(name, report.lag_s)
                connects.add_metric(name, report.connects)
                entries.add_metric(name, report.entries)
                states.add_metric(name, report.states)
        yield from (up, lag, connects, entries, states)
