"""For how long it is worth waiting for a decode worker that is not here, and how requests wait for it."""

import math

import pytest

from router.types.worker_view import WorkerKey
from router.workers.expected_workers import ExpectedWorkers
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.values.ids import Incarnation, WorkerId
from tests.support.router.admission_world import Desk
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


def test_one_that_was_named_lately_is_expected_until_it_has_been_for_long(world: World) -> None:
    assert world.due_s() == 60.0
    world.now_s += 59.0
    world.expected.named({HERE})
    assert world.due_s() == 1.0
    world.now_s += 1.0
    assert world.due_s() == 0.0


def test_one_that_is_here_is_not_expected_and_is_as_soon_as_it_has_gone(world: World) -> None:
    key = world.joins(1)
    assert world.due_s(serving=1) == 0.0
    world.now_s += 1000.0
    world.expected.left(key, in_order=False)
    world.expected.named({HERE})
    assert world.due_s() == 60.0
    # Here one is in trouble, and another one serves: whoever that one refused may wait for the first.
    assert world.due_s(serving=1) == 60.0
    world.joins(2)
    assert world.due_s(serving=1) == 0.0


def test_nobody_is_expected_whom_nobody_names(world: World) -> None:
    key = world.joins(1)
    world.expected.named(())
    world.expected.left(key, in_order=False)
    assert world.due_s() == 0.0


def test_the_last_one_is_replaced_when_it_was_told_to_go(world: World) -> None:
    key = world.joins(1)
    world.expected.named(())
    assert world.due_s(leaving=1) == math.inf
    assert world.due_s(serving=1, leaving=1) == 0.0
    world.expected.left(key, in_order=True)
    world.now_s += 20.0
    assert (world.due_s(), world.due_s(serving=1)) == (40.0, 0.0)


def test_who_is_turned_away_each_time_is_not_expected_for_ever(world: World) -> None:
    for incarnation in range(3):
        key = WorkerKey(WorkerId("of another model"), Incarnation(incarnation))
        world.expected.found(HERE, key)
        world.now_s += 30.0
    assert world.due_s() == 0.0


def test_addresses_are_told_apart(world: World) -> None:
    world.joins(1)
    world.now_s += 50.0
    world.expected.named({HERE, THERE})
    world.now_s += 5.0
    assert world.due_s(serving=1) == 55.0
    world.joins(2, THERE)
    assert world.due_s(serving=2) == 0.0


def test_a_worker_that_is_expected_is_waited_for() -> None:
    desk = Desk()
    desk.workers, desk.is_due = [], True
    first, second = desk.ask(), desk.ask(within_s=3.0)
    assert first.waiting
    assert second.waiting
    assert desk.turns() == []
    desk.now_s += 4.0
    ((entry, error),) = desk.admission.hopeless()
    assert entry is second
    assert isinstance(error, DeadlineExceeded)
    desk.now_s += 1.0
    desk.workers = [snapshot()]
    assert desk.turns() == [first]


def test_it_is_waited_for_no_longer_than_anybody_waits_nor_when_it_is_not_expected_any_more() -> None:
    desk = Desk()
    desk.workers, desk.is_due = [], True
    first = desk.ask()
    desk.now_s += 5.0
    second = desk.ask()
    assert desk.admission.hopeless() == []
    desk.now_s += 5.1
    ((entry, error),) = desk.admission.hopeless()
    assert entry is first
    assert isinstance(error, Unavailable)
    assert error.message == "no decode worker accepts requests: the wait would be longer than 10 s"
    assert desk.turns() == []
    desk.is_due = False
    assert desk.turns() == [second], "dispatch says what is wrong"


def test_a_time_without_workers_says_nothing_of_how_fast_the_queue_drains() -> None:
    desk = Desk()
    desk.workers, desk.is_due = [], True
    desk.ask()
    rate = desk.admission._forecast.rate(desk.admission._watch.measure())
    desk.now_s += 9.0
    desk.admission.hopeless()
    assert desk.admission._forecast.rate(desk.admission._watch.measure()) == pytest.approx(rate)
