"""Workers' own KV transfer counts, from their report to /metrics."""

from msgspec.structs import replace

from router.fleet.session_wire import load_from_pb
from router.metrics.router_metrics import RouterMetrics
from router.types.worker_view import WorkerKey
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tests.support.router.worker_views import worker


def reported(
    *, num_bytes: int, seconds: float = 0.5, transport: str = "tcp", outcome: str = "committed"
) -> pb.LoadSnapshot:
    ended = pb.TransferEnds(
        transport=transport, outcome=outcome, count=3, num_bytes=num_bytes, seconds=seconds, chunks=8, damaged_chunks=1
    )
    received = pb.TransferSide(started=4, ended=[ended], bad_messages=2, live=1, bytes_per_s=1e9)
    report = pb.TransferReport(
        sent=pb.TransferSide(live=3), received=received, loans=2, fetches_declined=5, fetched_tokens=64,
        lent_tokens=32, pinned_blocks=7, leased_blocks=9, quarantined_blocks=4,
    )  # fmt: skip
    return pb.LoadSnapshot(transfers=report)


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"worker": "d", "role": "decode"} | labels)


ENDED = {"direction": "received", "kind": "handoff", "transport": "tcp", "outcome": "committed"}


def test_transfer_metrics_export_worker_totals() -> None:
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("d", load=load_from_pb(reported(num_bytes=100)))])
    shown = {
        "tandem_worker_transfers_total": 3,
        "tandem_worker_transfer_bytes_total": 100,
        "tandem_worker_transfer_seconds_total": 0.5,
        "tandem_worker_transfer_chunks_total": 8,
        "tandem_worker_transfer_damaged_chunks_total": 1,
    }
    assert {name: value(metrics, name, **ENDED) for name in shown} == shown
    side = {
        "tandem_worker_transfers_started_total": 4,
        "tandem_worker_transfer_bad_messages_total": 2,
        "tandem_worker_transfers_live": 1,
        "tandem_worker_transfer_rate_bytes_per_second": 1e9,
    }
    assert {name: value(metrics, name, direction="received") for name in side} == side
    blocks = {"pinned": 7, "leased": 9, "quarantined": 4}
    assert {state: value(metrics, "tandem_worker_transfer_blocks", state=state) for state in blocks} == blocks
    assert value(metrics, "tandem_worker_transfer_exports", kind="handoff") == 1
    assert value(metrics, "tandem_worker_transfer_exports", kind="fetch") == 2
    assert value(metrics, "tandem_worker_prefix_fetches_total", outcome="declined") == 5
    assert value(metrics, "tandem_worker_prefix_fetched_tokens_total") == 64
    assert value(metrics, "tandem_worker_prefix_lent_tokens_total") == 32
    text = metrics.render().decode()
    assert all(f"# HELP {name} " in text for name in (*shown, *side))


def test_transfer_metrics_failures_start_at_zero() -> None:
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("d", load=load_from_pb(reported(num_bytes=100)))])
    total = "tandem_worker_transfers_total"
    assert [value(metrics, total, **ENDED | {"outcome": one}) for one in ("committed", "failed", "expired")] == [
        3,
        0,
        0,
    ]
    assert value(metrics, total, **ENDED | {"transport": "shm", "outcome": "failed"}) is None
    assert value(metrics, "tandem_worker_transfer_damaged_chunks_total", **ENDED | {"outcome": "failed"}) == 0
    metrics.worker_loads([worker("d", load=load_from_pb(reported(num_bytes=100, outcome="failed")))])
    assert [value(metrics, total, **ENDED | {"outcome": one}) for one in ("failed", "expired")] == [3, 0]


def test_transfer_metrics_restart_resets_totals() -> None:
    metrics = RouterMetrics("m")
    bytes_total = "tandem_worker_transfer_bytes_total"
    first = worker("d", load=load_from_pb(reported(num_bytes=100)))
    metrics.worker_loads([first])
    metrics.worker_loads([replace(first, load=load_from_pb(reported(num_bytes=150)))])
    assert value(metrics, bytes_total, **ENDED) == 150
    metrics.worker_loads([])
    assert value(metrics, bytes_total, **ENDED) is None, "a worker that left is no longer shown"
    key = WorkerKey(first.info.key.worker_id, Incarnation(2))
    again = replace(first, info=replace(first.info, key=key))
    metrics.worker_loads([replace(again, load=load_from_pb(pb.LoadSnapshot()))])
    assert value(metrics, bytes_total, **ENDED) is None, "no report yet: nothing, rather than a 0 that nobody reported"
    metrics.worker_loads([replace(again, load=load_from_pb(reported(num_bytes=20)))])
    assert value(metrics, bytes_total, **ENDED) == 20, "its own, which Prometheus takes for a reset"


def test_transfer_metrics_unknown_outcome_is_not_a_label() -> None:
    metrics = RouterMetrics("m")
    made_up = reported(num_bytes=1, transport="carrier pigeon", outcome="eaten")
    made_up.transfers.sent.ended.extend(made_up.transfers.received.ended[:1] * 10_000)
    load = load_from_pb(made_up)
    assert load.transfers is not None
    assert len(load.transfers.sides[0].ended) < 100
    metrics.worker_loads([worker("d", load=load)])
    other = ENDED | {"transport": "other", "outcome": "other"}
    assert value(metrics, "tandem_worker_transfer_bytes_total", **other) == 1
    unreached = load_from_pb(reported(num_bytes=0, transport="", outcome="failed"))
    metrics.worker_loads([worker("d", load=unreached)])
    none = ENDED | {"transport": "none", "outcome": "failed"}
    assert value(metrics, "tandem_worker_transfers_total", **none) == 3


def test_transfer_metrics_migrated_blocks_by_outcome() -> None:
    reports = [
        pb.MigratedBlocks(outcome="moved", blocks=5, num_bytes=500),
        pb.MigratedBlocks(outcome="made up", blocks=2, num_bytes=200),
    ]
    metrics = RouterMetrics("m")
    load = load_from_pb(pb.LoadSnapshot(transfers=pb.TransferReport(inherited=reports)))
    metrics.worker_loads([worker("d", load=load)])
    assert value(metrics, "tandem_worker_inherited_blocks_total", outcome="moved") == 5
    assert value(metrics, "tandem_worker_inherited_bytes_total", outcome="moved") == 500
    assert value(metrics, "tandem_worker_inherited_blocks_total", outcome="other") == 2


def test_adapter_metrics_export_worker_reports() -> None:
    metrics = RouterMetrics("m")
    report = pb.AdapterReport(
        loads=7, evictions=3, failures=1, load_seconds=2.5, num_waiting=4, held_bytes=5, capacity_bytes=9
    )
    load = load_from_pb(pb.LoadSnapshot(adapters=report, resident_adapters=["a", "b"]))
    metrics.worker_loads([worker("d", load=load), worker("none", load=load_from_pb(pb.LoadSnapshot()))])
    assert value(metrics, "tandem_worker_adapter_loads_total", worker="d") == 7
    assert value(metrics, "tandem_worker_adapter_load_seconds_total", worker="d") == 2.5
    assert value(metrics, "tandem_worker_adapters", worker="d") == 2
    assert value(metrics, "tandem_worker_adapter_waiting", worker="d") == 4
    assert b'tandem_worker_adapters{role="decode",worker="none"' not in metrics.render()


def test_no_metric_names_a_worker_that_left() -> None:
    metrics = RouterMetrics("m")
    metrics.worker_loads([worker("gone-7f3a", load=load_from_pb(reported(num_bytes=100)))])
    assert b"gone-7f3a" in metrics.render()
    metrics.worker_loads([worker("d", load=load_from_pb(reported(num_bytes=100)))])
    assert [line for line in metrics.render().splitlines() if b"gone-7f3a" in line] == []
