"""How long requests wait for an expected decode worker, and in which order."""

import math

import pytest

from router.types.worker_view import WorkerKey
from router.workers.expected_workers import ExpectedWorkers
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.values.ids import Incarnation, WorkerId
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.overload_world import snapshot

HERE, THERE = "10.0.0.1:1", "10.0.0.2:1"


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.expected = ExpectedWorkers(within_s=60.0, clock=lambda: self.now_s)
        self.expected.named({HERE})

    def joins(self, incarnation: int, address: str = HERE) -> WorkerKey:
        key = WorkerKey(WorkerId(f"at {address}"), Incarnation(incarnation))
        self.expected.found(address, key)
        self.expected.joined(key)
        return key

    def due_s(self, *, serving: int = 0, leaving: int = 0) -> float:
        return self.expected.due_s(num_serving=serving, num_leaving=leaving)


@pytest.fixture
def world() -> World:
    return World()


def test_expected_worker_named_recently_is_due_for_a_while(world: World) -> None:
    assert world.due_s() == 60.0
    world.now_s += 59.0
    world.expected.named({HERE})
    assert world.due_s() == 1.0
    world.now_s += 1.0
    assert world.due_s() == 0.0


def test_expected_worker_connected_is_not_due_until_it_leaves(world: World) -> None:
    key = world.joins(1)
    assert world.due_s(serving=1) == 0.0
    world.now_s += 1000.0
    world.expected.left(key, in_order=False)
    world.expected.named({HERE})
    assert world.due_s() == 60.0
    # One is in trouble, another one serves: a request that the latter refused may wait for the former.
    assert world.due_s(serving=1) == 60.0
    world.joins(2)
    assert world.due_s(serving=1) == 0.0


def test_expected_worker_without_address_is_not_due(world: World) -> None:
    key = world.joins(1)
    world.expected.named(())
    world.expected.left(key, in_order=False)
    assert world.due_s() == 0.0


def test_expected_worker_after_last_drain_is_due(world: World) -> None:
    key = world.joins(1)
    world.expected.named(())
    assert world.due_s(leaving=1) == math.inf
    assert world.due_s(serving=1, leaving=1) == 0.0
    world.expected.left(key, in_order=True)
    world.now_s += 20.0
    assert (world.due_s(), world.due_s(serving=1)) == (40.0, 0.0)


def test_expected_worker_always_rejected_is_not_due_forever(world: World) -> None:
    for incarnation in range(3):
        key = WorkerKey(WorkerId("of another model"), Incarnation(incarnation))
        world.expected.found(HERE, key)
        world.now_s += 30.0
    assert world.due_s() == 0.0


def test_expected_workers_track_addresses_separately(world: World) -> None:
    world.joins(1)
    world.now_s += 50.0
    world.expected.named({HERE, THERE})
    world.now_s += 5.0
    assert world.due_s(serving=1) == 55.0
    world.joins(2, THERE)
    assert world.due_s(serving=2) == 0.0


def test_request_waits_for_expected_worker() -> None:
    bench = AdmissionBench()
    bench.workers, bench.is_due = [], True
    first, second = bench.enter(), bench.enter(within_s=3.0)
    assert first.waiting
    assert second.waiting
    assert bench.turns() == []
    bench.now_s += 4.0
    ((entry, error),) = bench.admission.end_hopeless()
    assert entry is second
    assert isinstance(error, DeadlineExceeded)
    bench.now_s += 1.0
    bench.workers = [snapshot()]
    assert bench.turns() == [first]


def test_request_wait_for_expected_worker_is_bounded() -> None:
    bench = AdmissionBench()
    bench.workers, bench.is_due = [], True
    first = bench.enter()
    bench.now_s += 5.0
    second = bench.enter()
    assert bench.admission.end_hopeless() == []
    bench.now_s += 5.1
    ((entry, error),) = bench.admission.end_hopeless()
    assert entry is first
    assert isinstance(error, Unavailable)
    assert error.message == "no decode worker accepts requests: the wait would be longer than 10 s"
    assert bench.turns() == []
    bench.is_due = False
    assert bench.turns() == [second], "dispatch says what is wrong"


def test_drain_rate_is_not_learnt_without_workers() -> None:
    bench = AdmissionBench()
    bench.workers, bench.is_due = [], True
    bench.enter()
    meter, watch = bench.admission._forecast.meter, bench.admission._watch
    rate = meter.rate(watch.measure().prefill_tokens_per_s)
    bench.now_s += 9.0
    bench.admission.end_hopeless()
    assert meter.rate(watch.measure().prefill_tokens_per_s) == pytest.approx(rate)
