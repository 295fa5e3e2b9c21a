"""What workers report of KV on its way, cache tiers, pinned prefixes and Redis: totals shown as they
came, never added up.

A worker's totals begin at 0 with its process, so they never fall while it lives; a restart is a reset, as Prometheus
knows it. A worker that left is no longer shown.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import CacheTierLoad, TransferEnds, TransferReport, TransferSide, WorkerSnapshot

_WORKER = ("worker", "role")
_SIDE = (*_WORKER, "direction")
_ENDS = (*_SIDE, "kind", "transport", "outcome")

_END_COUNTERS: Mapping[str, tuple[str, str]] = {
    "count": (
        "tandem_worker_transfers",
        "Attempts to move KV that ended, sent or received, by how: prompts (handoff) and prefixes (fetch)",
    ),
    "num_bytes": ("tandem_worker_transfer_bytes", "KV bytes that those attempts moved, on the wire"),
    "seconds": (
        "tandem_worker_transfer_seconds",
        "Seconds in which just those bytes were written, by the sender's clock; several writes may overlap",
    ),
    "chunks": ("tandem_worker_transfer_chunks", "Chunks of KV in those attempts, each under one checksum"),
    "damaged_chunks": (
        "tandem_worker_transfer_damaged_chunks",
        "Chunks that arrived damaged and were sent again; more than a few mean a bad link",
    ),
}
_TOLD_OF, _RUNG_FOR = ("failed", "expired"), ("count", "damaged_chunks")
"""Outcomes and figures that alarms are about."""
_SIDE_COUNTERS: Mapping[str, tuple[str, str]] = {
    "started": (
        "tandem_worker_transfers_started",
        "Attempts to move KV that began; less those that ended is what is under way",
    ),
    "bad_messages": (
        "tandem_worker_transfer_bad_messages",
        "Messages of peers that were malformed or meant for another process, and ignored",
    ),
}
_SIDE_GAUGES: Mapping[str, tuple[str, str]] = {
    "live": ("tandem_worker_transfers_live", "Attempts not closed yet, those in quarantine included"),
    "bytes_per_s": (
        "tandem_worker_transfer_rate_bytes_per_second",
        "Measured rate of one write, mean of the last some tens of chunks; 0: nothing was measured",
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
    "fetches_started": ("tandem_worker_prefix_fetches_started", "Prefixes that the worker began to fetch from a peer"),
    "fetched_tokens": ("tandem_worker_prefix_fetched_tokens", "Prompt tokens fetched from peers instead of computed"),
    "lent_tokens": ("tandem_worker_prefix_lent_tokens", "Prompt tokens held here that peers asked for and were given"),
}


_INHERITED: Mapping[str, tuple[str, str]] = {
    "num_blocks": (
        "tandem_worker_inherited_blocks",
        "Cached blocks that workers which left offered to this one, by outcome: moved, failed, held here already, "
        "computed (that would cost less), no_room, no_time",
    ),
    "num_bytes": ("tandem_worker_inherited_bytes", "Bytes of those blocks, as this worker stores them"),
}


class _Shown(NamedTuple):
    labels: tuple[str, str]
    report: TransferReport


class TransferMetrics(Collector):
    """Shows what workers last said."""

    def __init__(self) -> None:
        self._shown: list[_Shown] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace what is shown."""
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
            inherited = CounterMetricFamily(name, text, labels=(*_WORKER, "outcome"))
            for shown in self._shown:
                for blocks in shown.report.inherited:
                    inherited.add_metric((*shown.labels, blocks.outcome), getattr(blocks, field))
            yield inherited
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
            for labels in self._not_yet() if field in _RUNG_FOR else ():
                ended.add_metric(labels, 0.0)
            yield ended

    def _not_yet(self) -> Iterator[tuple[str, ...]]:
        """Ways in which nothing ended so far where something has: a rate is to see the first, too."""
        seen = {labels for labels, _ in self._ends()}
        for *where, _ in sorted({(*labels[:-1], "") for labels in seen}):
            yield from ((*where, outcome) for outcome in _TOLD_OF if (*where, outcome) not in seen)

    def _blocks(self) -> Metric:
        text = (
            "KV blocks that transfers hold: pinned (sources held for readers), leased (destinations that a peer may "
            "write), quarantined (those of the leased whose writer failed and is not proven quiet)"
        )
        gauge = GaugeMetricFamily("tandem_worker_transfer_blocks", text, labels=(*_WORKER, "state"))
        for shown in self._shown:
            for field, state in _BLOCK_STATES.items():
                gauge.add_metric((*shown.labels, state), getattr(shown.report, field))
        return gauge

    def _exports(self) -> Metric:
        text = "Sending attempts alive: prompts being handed over, and prefixes lent to peers that fetch them"
        gauge = GaugeMetricFamily("tandem_worker_transfer_exports", text, labels=(*_WORKER, "kind"))
        for shown in self._shown:
            sent = next((side.live for side in shown.report.sides if side.direction == "sent"), 0)
            gauge.add_metric((*shown.labels, "handoff"), max(0, sent - shown.report.loans))
            gauge.add_metric((*shown.labels, "fetch"), shown.report.loans)
        return gauge

    def _fetches(self) -> Metric:
        text = (
            "Hints that a peer holds a prefix, by what came of them: completed, failed (what landed is kept, the rest "
            "computed), declined (held here already, or cheaper to compute)"
        )
        counter = CounterMetricFamily("tandem_worker_prefix_fetches", text, labels=(*_WORKER, "outcome"))
        for shown in self._shown:
            for field, outcome in _FETCHES.items():
                counter.add_metric((*shown.labels, outcome), getattr(shown.report, field))
        return counter


_TIER = ("worker", "role", "tier")
_TIER_COUNTERS: Mapping[str, str] = {
    "hits": "Prompt blocks found in a tier, and in no nearer one",
    "misses": "Full prompt blocks looked for in a tier and not found there",
    "stores": "Blocks that came down to a tier",
    "evictions": "Blocks that a tier gave up",
    "stored_bytes": "Bytes written to a tier",
    "loaded_bytes": "Bytes read from a tier",
    "dropped": "Blocks that should have come to a tier and did not: no room, or a slow or full disk",
    "damaged": "Copies thrown away unused: damaged, cut short, or of another cache",
    "late": "Requests that stopped waiting for a tier and computed",
}
_TIER_SECONDS: Mapping[str, str] = {
    "store_s": "tandem_worker_cache_store_seconds",
    "load_s": "tandem_worker_cache_load_seconds",
}


class TierMetrics(Collector):
    """Shows what workers last said; a worker that left is no longer shown."""

    def __init__(self) -> None:
        self._shown: list[tuple[tuple[str, str, str], CacheTierLoad]] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace what is shown."""
        self._shown = [
            ((snapshot.info.key.worker_id, snapshot.info.role.value, tier.tier), tier)
            for snapshot in snapshots
            for tier in snapshot.load.cache_tiers
        ]

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("tandem_worker_cache_blocks", "Cached blocks by tier", labels=_TIER)
        room = GaugeMetricFamily("tandem_worker_cache_capacity_blocks", "Room for blocks by tier", labels=_TIER)
        for labels, tier in self._shown:
            blocks.add_metric(labels, tier.num_blocks)
            room.add_metric(labels, tier.capacity_blocks)
        yield from (blocks, room)
        for field, text in _TIER_COUNTERS.items():
            yield self._counter(f"tandem_worker_cache_{field}", text, field)
        for field, name in _TIER_SECONDS.items():
            yield self._counter(name, "Seconds that just those bytes took", field)

    def _counter(self, name: str, text: str, field: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_TIER)
        for labels, tier in self._shown:
            family.add_metric(labels, getattr(tier, field))
        return family


_PIN_EVENTS = ("made", "renewed", "refused", "gave_way", "expired")


class PinMetrics(Collector):
    """Shows what workers last said; a worker that left is no longer shown."""

    def __init__(self) -> None:
        self._shown: tuple[WorkerSnapshot, ...] = ()

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace what is shown."""
        self._shown = tuple(snapshots)

    def collect(self) -> Iterable[Metric]:
        prefixes = GaugeMetricFamily("tandem_worker_pinned_prefixes", "Prefixes that are kept", labels=_WORKER)
        blocks = GaugeMetricFamily("tandem_worker_pinned_blocks", "KV blocks that stay for them", labels=_WORKER)
        limit = GaugeMetricFamily("tandem_worker_pinned_blocks_limit", "KV blocks that may", labels=_WORKER)
        events = CounterMetricFamily(
            "tandem_worker_pinned_prefix_events",
            "What became of pins: made, renewed, refused, gave_way (to another, or to a large request), expired",
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


class PublishMetrics(Collector):
    """How workers fare in publishing, as they report it."""

    def __init__(self) -> None:
        self._snapshots: tuple[WorkerSnapshot, ...] = ()

    def update(self, snapshots: tuple[WorkerSnapshot, ...]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Of workers that publish."""
        labels = ("worker",)
        up = GaugeMetricFamily("tandem_worker_redis_up", "Whether Redis takes what the worker publishes", labels=labels)
        lag = GaugeMetricFamily(
            "tandem_worker_redis_lag_seconds", "Age of the oldest change not yet published", labels=labels
        )
        connects = CounterMetricFamily("tandem_worker_redis_connects", "Connections that workers made", labels=labels)
        entries = CounterMetricFamily("tandem_worker_redis_entries", "Entries that workers wrote", labels=labels)
        states = CounterMetricFamily("tandem_worker_redis_states", "Whole states that workers wrote", labels=labels)
        for snapshot in self._snapshots:
            if (report := snapshot.load.board) is not None:
                name = (snapshot.info.key.worker_id,)
                up.add_metric(name, report.is_up)
                lag.add_metric(name, report.lag_s)
                connects.add_metric(name, report.connects)
                entries.add_metric(name, report.entries)
                states.add_metric(name, report.states)
        yield from (up, lag, connects, entries, states)
