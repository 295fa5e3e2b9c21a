"""Link speed between two workers: by pair, by class, and by priors."""

import numpy as np
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.worker_health import LinkMetrics
from router.types.worker_view import WorkerInfo, WorkerKey
from router.workers import pair_links
from router.workers.columns import PoolMembers
from router.workers.pair_links import HALF_LIFE_S, LinkClass, Locality, PairLinks, PairTable, link_class
from tandem.values.ids import Incarnation
from tests.support.router.worker_views import worker

BOTH = frozenset({"shm", "tcp"})


def info(name: str, host: str, *, transports: frozenset[str] = BOTH, rack: str = "") -> WorkerInfo:
    return replace(worker(name, transports=transports).info, handoff_address=f"{host}:1", rack=rack)


def pool(*infos: WorkerInfo) -> PoolMembers:
    return PoolMembers(infos, range(len(infos)))


def observe(
    table: PairTable, prefill: WorkerInfo, decode: WorkerInfo, s_per_byte: float, *, now_s: float = 0.0, times: int = 50
) -> None:
    for _ in range(times):
        exposed_s = 100 * decode.kv_bytes_per_token * s_per_byte
        table.observe(prefill, decode, num_tokens=100, exposed_s=exposed_s, now_s=now_s)


def column_of(table: PairTable, decode: list[WorkerInfo], prefill: list[WorkerInfo], row: int, now_s: float = 0.0):
    links = PairLinks(table, pool(*decode), pool(*prefill))
    assert links.refreshed(now_s)
    return links.column(row) / decode[row].kv_bytes_per_token / 1e3


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (info("d0", "a"), LinkClass(Locality.HOST, "shm")),
        (info("d0", "a", transports=frozenset({"tcp"})), LinkClass(Locality.HOST, "tcp")),
        (info("d0", "b", rack="r"), LinkClass(Locality.RACK, "tcp")),
        (info("d0", "b", rack="s"), LinkClass(Locality.BEYOND, "tcp")),
        (info("d0", "b", transports=frozenset()), LinkClass(Locality.BEYOND, "")),
    ],
)
def test_link_class_is_by_host_rack_and_transport(decode: WorkerInfo, expected: LinkClass) -> None:
    assert link_class(info("p0", "a", rack="r"), decode) == expected


def test_pair_links_priors_prefer_nearer_link() -> None:
    prefill = [info("p0", "a", rack="r"), info("p1", "b", rack="r"), info("p2", "c", rack="s")]
    added = column_of(PairTable(), [info("d0", "a", rack="r")], prefill, 0)
    assert added[0] < added[1] < added[2]
    assert added.sum() == pytest.approx(0.0, abs=1e-18)


def test_pair_links_of_one_class_are_equal_until_measured() -> None:
    table, prefill, decode = PairTable(), [info("p0", "b"), info("p1", "c")], [info("d0", "a")]
    links = PairLinks(table, pool(*decode), pool(*prefill))
    assert not links.refreshed(0.0)
    for one in prefill:
        observe(table, one, decode[0], 1e-9)
    assert not links.refreshed(2.0)
    observe(table, prefill[1], decode[0], 9e-9, now_s=2.0)
    assert not links.refreshed(2.5)
    assert links.refreshed(3.1)
    assert links.column(0)[1] > 0.0 > links.column(0)[0]


def test_pair_links_measured_class_replaces_prior() -> None:
    """Detects a shared-memory link that is slower than TCP."""
    table, decode = PairTable(), [info("d0", "a"), info("d1", "b")]
    prefill = [info("p0", "a"), info("p1", "b")]
    before = column_of(table, decode, prefill, 1)
    assert before[1] < before[0]
    observe(table, prefill[0], decode[0], 50e-9)
    observe(table, prefill[0], decode[1], 0.1e-9)
    after = column_of(table, decode, prefill, 1)
    assert after[1] > after[0]


def test_pair_links_measurement_fades_to_class() -> None:
    table, decode, prefill = PairTable(), [info("d0", "a")], [info("p0", "b"), info("p1", "c"), info("p2", "a")]
    observe(table, prefill[0], decode[0], 1e-9)
    observe(table, prefill[1], decode[0], 9e-9)
    slow = column_of(table, decode, prefill, 0)
    assert slow[1] - slow[0] > 4e-9
    faded = column_of(table, decode, prefill, 0, now_s=20 * HALF_LIFE_S)
    assert faded[1] == pytest.approx(faded[0], rel=1e-3)
    assert faded[2] < faded[0]


def test_pair_measurements_fade_in_turn_when_more_than_are_computed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_links, "MOST_REFRESHED", 1)
    table, decode, prefill = PairTable(), [info("d0", "a"), info("d1", "b")], [info("p0", "c"), info("p1", "d")]
    measured = [(sender, receiver) for receiver in reversed(decode) for sender in prefill]
    for sender, receiver in measured:
        observe(table, sender, receiver, 9e-9 if sender is prefill[0] else 1e-9)
    links = PairLinks(table, pool(*decode), pool(*prefill))
    for second in range(len(measured)):
        links.refreshed(float(second))
    assert {pair: own.keys() for pair, own in table.own_ms.items()} == {
        receiver.key: {sender.key for sender in prefill} for receiver in decode
    }
    # From then on only hand-offs to the first receiver are measured.
    later_s = 20 * HALF_LIFE_S
    for sender in prefill:
        observe(table, sender, decode[0], 9e-9 if sender is prefill[0] else 1e-9, now_s=later_s)
    for second in range(2 * len(measured)):
        links.refreshed(later_s + second)
    assert table.own_ms.keys() == {decode[0].key}


def test_pair_links_impossible_pair_is_infinite() -> None:
    prefill = [info("p0", "a"), info("p1", "b"), info("p2", "b", transports=frozenset({"nixl"}))]
    assert np.isinf(column_of(PairTable(), [info("d0", "a")], prefill, 0)).tolist() == [False, False, True]


def test_pair_table_keeps_most_recently_used_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_links, "MAX_PAIRS", 3)
    table, decode = PairTable(), info("d0", "a")
    senders = [info(f"p{number}", "b") for number in range(5)]
    for one in (*senders[:3], senders[0], *senders[3:]):
        observe(table, one, decode, 1e-9, times=1)
    assert [pair[0].worker_id for pair in table.pairs] == ["p0", "p3", "p4"]
    assert set(table.changed) == set(table.pairs)


def test_pair_table_forgets_departed_workers() -> None:
    table, decode = PairTable(), info("d0", "a")
    for one in (info("p0", "b"), info("p1", "b")):
        observe(table, one, decode, 1e-9)
    table.left(info("p0", "b").key)
    assert [pair[0].worker_id for pair in table.pairs] == ["p1"]
    table.left(WorkerKey(decode.key.worker_id, Incarnation(2)))
    assert len(table.receivers) == 1
    table.left(decode.key)
    assert not table.pairs
    assert not table.receivers
    assert not table.changed
    assert [rate.link.locality for rate in table.rates(0.0)] == [Locality.BEYOND]


def test_what_pairs_differ_by_outlasts_joins_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that grows with the number of pairs is done when a worker joins or leaves: the event loop waits."""
    table, decode = PairTable(), [info("d0", "a"), info("d1", "b")]
    prefill = [info("p0", "c"), info("p1", "d")]
    for sender in prefill:
        for receiver in decode:
            observe(table, sender, receiver, 9e-9 if sender is prefill[0] else 1e-9)
    column_of(table, decode, prefill, 0)
    assert not table.changed
    # Rows move, and only pairs with new measurements are computed again.
    monkeypatch.setattr(pair_links, "MOST_REFRESHED", 0)
    more = [info("p9", "e"), *prefill]
    slow, none, fast = (column_of(table, [decode[1]], more, 0)[row] for row in (1, 0, 2))
    assert slow > none > fast
    table.left(prefill[0].key)
    assert {key: own.keys() for key, own in table.own_ms.items()} == {one.key: {prefill[1].key} for one in decode}
    assert table.fading.keys() == table.pairs.keys()
    for one in (prefill[1], *decode):
        table.left(one.key)
    assert (len(table.pairs), table.own_ms, table.fading, table._partners) == (0, {}, {}, {})


def test_pair_table_ignores_impossible_measurements() -> None:
    table = PairTable()
    table.observe(info("p0", "a"), info("d0", "b"), num_tokens=0, exposed_s=1.0, now_s=0.0)
    for exposed_s in (-1.0, float("nan"), float("inf")):
        table.observe(info("p0", "a"), info("d0", "b"), num_tokens=9, exposed_s=exposed_s, now_s=0.0)
    assert not table.pairs


def test_link_metrics_export_every_measured_class() -> None:
    table, registry = PairTable(), CollectorRegistry()
    registry.register(LinkMetrics(table, lambda: HALF_LIFE_S))
    assert b'locality="' not in generate_latest(registry)
    observe(table, info("p0", "a"), info("d0", "a"), 1e-9)
    observe(table, info("p0", "a"), info("d1", "b"), 1e-8)
    host = {"locality": "host", "transport": "shm"}
    assert registry.get_sample_value("tandem_link_handoffs", host) == pytest.approx(25.0)
    assert registry.get_sample_value("tandem_link_bytes_per_second", host) == pytest.approx(1e9, rel=0.2)
    beyond = {"locality": "beyond", "transport": "tcp"}
    assert registry.get_sample_value("tandem_link_bytes_per_second", beyond) == pytest.approx(1e8, rel=0.2)
