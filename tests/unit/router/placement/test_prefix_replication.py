"""Which prefixes get another copy, when, at what cost, and when it stops."""

from random import Random

import pytest

from router.placement.costs import CostModel
from router.placement.placer import Assignment, Placer
from router.placement.prefix_replication import HotPrefixes, ReplicationPolicy
from router.placement.worker_selection import Affinity
from router.types.worker_view import PrefixChange, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.values.ids import BlockHash
from tests.support.router.worker_views import port, worker

NAMES = [BlockHash(i.to_bytes(16, "big")) for i in range(70)]
POLICY = ReplicationPolicy(settle_s=1.0, half_life_s=5.0)


def ask(hot: HotPrefixes, *, for_s: float, per_s: float, work_ms: float, from_s: float = 0.0) -> float:
    """Requests at a steady rate; returns the time afterwards."""
    for number in range(round(for_s * per_s)):
        hot.on_placed(NAMES, work_ms=work_ms, tokens=100, now_s=from_s + number / per_s)
    return from_s + for_s


def test_replication_busy_holder_wants_a_copy() -> None:
    for per_s, wanted in ((4.0, 0), (6.0, 1024)):
        hot = HotPrefixes(POLICY)
        now_s = ask(hot, for_s=60.0, per_s=per_s, work_ms=100.0)
        assert hot.wanted_tokens(NAMES, lambda _: 1, now_s) == wanted
        # Two suffice for either.
        assert hot.wanted_tokens(NAMES, lambda _: 2, now_s) == 0
        # What nobody has cannot be copied.
        assert hot.wanted_tokens(NAMES, lambda _: 0, now_s) == 0


@pytest.mark.parametrize(("num_holders", "wanted"), [(1, 1024), (2, 1024), (3, 1024), (4, 0), (5, 0)])
def test_replication_more_demand_wants_more_copies(num_holders: int, wanted: int) -> None:
    hot = HotPrefixes(POLICY)
    now_s = ask(hot, for_s=60.0, per_s=18.0, work_ms=100.0)
    assert hot.wanted_tokens(NAMES, lambda _: num_holders, now_s) == wanted


def test_replication_copies_have_hysteresis() -> None:
    """Between the two bounds nothing changes, from either direction."""
    hot = HotPrefixes(POLICY)
    now_s = ask(hot, for_s=60.0, per_s=6.0, work_ms=100.0)
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s)
    now_s = ask(hot, for_s=60.0, per_s=3.0, work_ms=100.0, from_s=now_s)
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s)
    now_s = ask(hot, for_s=60.0, per_s=1.0, work_ms=100.0, from_s=now_s)
    assert not hot.wanted_tokens(NAMES, lambda _: 1, now_s)
    now_s = ask(hot, for_s=60.0, per_s=3.0, work_ms=100.0, from_s=now_s)
    assert not hot.wanted_tokens(NAMES, lambda _: 1, now_s)


def test_replication_makes_one_copy_at_a_time() -> None:
    hot = HotPrefixes(POLICY)
    now_s = ask(hot, for_s=60.0, per_s=18.0, work_ms=100.0)
    hot.copied(NAMES, 1024, 0, now_s)
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s + 0.9) == 0
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s + 1.0) == 1024


def test_replication_budget_bounds_copies() -> None:
    hot = HotPrefixes(ReplicationPolicy(settle_s=0.0, half_life_s=5.0, burst_tokens=2_000, budget_share=0.1))
    now_s = ask(hot, for_s=60.0, per_s=18.0, work_ms=100.0)
    hot.copied(NAMES, 1024, 0, now_s)
    # The longest that can be paid for, rather than none.
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s) == 512
    hot.copied(NAMES, 512, 0, now_s)
    hot.copied(NAMES, 512, 100, now_s)
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s) == 0
    hot.on_placed(NAMES[:1], work_ms=1.0, tokens=5_000, now_s=now_s)
    assert hot.wanted_tokens(NAMES, lambda _: 1, now_s) == 512


def test_replication_followed_prefixes_are_bounded() -> None:
    hot, rng = HotPrefixes(ReplicationPolicy(most_prefixes=50)), Random(1)
    for _ in range(300):
        hot.on_placed([BlockHash(rng.randbytes(16)) for _ in range(40)], work_ms=1.0, tokens=10, now_s=0.0)
        hot.on_placed(NAMES, work_ms=1.0, tokens=10, now_s=0.0)
        assert len(hot) <= 50
    # What is asked for all the time is never forgotten.
    assert hot.wanted_tokens(NAMES, lambda _: 1, 0.0) or all(depth in (16, 32, 64) for depth in hot.depths(len(NAMES)))


def test_replication_prefixes_gone_cold_are_forgotten() -> None:
    hot, rng = HotPrefixes(ReplicationPolicy(half_life_s=1.0)), Random(1)
    for second in range(200):
        hot.on_placed([BlockHash(rng.randbytes(16)) for _ in range(16)], work_ms=1.0, tokens=10, now_s=float(second))
        hot.on_placed(NAMES[:16], work_ms=100.0, tokens=10, now_s=float(second))
    assert len(hot) <= 22
    (hottest,) = hot.hottest(1, 200.0)
    assert hottest.num_requests == 200


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(first: int, names: list[BlockHash]) -> PrefixChange:
    return PrefixChange(first_sequence=first, snapshot=False, changes=tuple((name, True) for name in names))


def holders_after(policy: ReplicationPolicy) -> tuple[int, int, float]:
    """One worker has a prefix, and can just bear its load: after a minute, how many have it, by how many copies on
    purpose; and within how many seconds nine of ten of the later prompts were computed.
    """
    clock = Clock()
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=clock)
    names = ["d0", "p0", "p1", "p2", "p3"]
    prefix = [BlockHash(i.to_bytes(16, "big")) for i in range(1024)]
    for name in names:
        info = worker(name, num_blocks=100_000).info
        registry.joined(info, port())
        registry.prefix_changed(info.key, PrefixChange(first_sequence=0, snapshot=True, changes=()))
    registry.prefix_changed(worker("p1").info.key, stored(0, prefix))
    placer = Placer(registry=registry, model=CostModel(), rng=Random(1), clock=clock, replication=policy)
    running: list[tuple[float, Assignment]] = []
    reported = dict.fromkeys((worker(name).info.key for name in names), 0) | {worker("p1").info.key: 1024}
    replicas, waits, arrivals = 0, [], Random(2)
    for number in range(600):
        clock.now_s += arrivals.expovariate(10.0)
        for name in names:
            load = WorkerLoad(num_free_blocks=100_000, num_running=20 if name == "d0" else 0)
            registry.load_changed(worker(name).info.key, load)
        while running and running[0][0] <= clock.now_s:
            ended = running.pop(0)[1]
            registry.prefix_changed(ended.computing, stored(reported[ended.computing], prefix))
            reported[ended.computing] += len(prefix)
            placer.release(ended)
        own = [BlockHash((1_000_000 + number * 32 + i).to_bytes(16, "big")) for i in range(25)]
        assignment = placer.assign(num_tokens=1049 * 16 + 1, names=[*prefix, *own])
        replicas += assignment.placement.affinity is Affinity.REPLICA
        # 5,000 tokens a second: the queue ahead of it and itself.
        computing = next(s for s in registry.snapshots() if s.info.key == assignment.computing)
        done_s = clock.now_s + computing.backlog_tokens / 5_000
        waits.append(done_s - clock.now_s)
        running.append((done_s, assignment))
        running.sort(key=lambda each: each[0])
    matched = registry.prefix_map.longest_prefix(prefix)
    return sum(blocks == 1024 for blocks in matched.values()), replicas, sorted(waits[300:])[270]


def test_replication_sends_requests_to_new_holder() -> None:
    holders, copies, wait_s = holders_after(ReplicationPolicy(burst_tokens=100_000))
    assert (holders, copies) == (2, 1)
    holders, copies, alone_s = holders_after(ReplicationPolicy(burst_tokens=0, budget_share=0.0))
    assert (holders, copies) == (1, 0)
    assert wait_s < alone_s / 2
