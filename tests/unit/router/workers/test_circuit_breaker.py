"""A failing worker is left alone, tried with one request at a time, and taken back."""

from router.types.worker_view import WorkerKey
from router.workers.circuit_breaker import BreakerState, WorkerBreakerPolicy, WorkerBreakers, WorkerCircuitBreaker
from tandem.values.ids import Incarnation, WorkerId

POLICY = WorkerBreakerPolicy(most_in_a_row=3, open_s=2.0, longest_open_s=6.0, probe_s=10.0)
KEY = WorkerKey(WorkerId("d0"), Incarnation(1))


def tripped() -> WorkerCircuitBreaker:
    breaker = WorkerCircuitBreaker(POLICY)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = WorkerCircuitBreaker(POLICY)
    for _ in range(20):
        for _ in range(3):
            breaker.succeeded(0.0)
        breaker.failed(0.0)
        breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert not tripped().allows(1.9)


def test_a_share_of_failures_opens_it() -> None:
    breaker = WorkerCircuitBreaker(POLICY)
    for number in range(12):
        (breaker.failed if number % 2 else breaker.succeeded)(float(number))
    assert breaker.state(12.0) is BreakerState.OPEN


def test_half_open_lets_one_probe_through_at_a_time() -> None:
    breaker = tripped()
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.allows(2.0)
    breaker.began(2.0)
    assert not breaker.allows(3.0)
    breaker.released()
    assert breaker.allows(3.0)
    breaker.began(3.0)
    assert breaker.allows(13.0)  # nothing was heard of that one


def test_a_probe_that_ends_well_closes_it_and_one_that_fails_doubles_the_time() -> None:
    breaker, now_s = tripped(), 0.0
    for open_s in (2.0, 4.0, 6.0, 6.0):
        assert not breaker.allows(now_s + open_s - 0.1)
        now_s += open_s
        breaker.began(now_s)
        breaker.failed(now_s)
    now_s += 6.0
    breaker.began(now_s)
    breaker.succeeded(now_s)
    assert breaker.state(now_s) is BreakerState.CLOSED
    for _ in range(2):
        breaker.failed(now_s)
    assert breaker.allows(now_s)


def test_old_requests_say_nothing_of_an_open_one() -> None:
    breaker = tripped()
    breaker.succeeded(1.0)
    breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert breaker.state(2.0) is BreakerState.HALF_OPEN


def test_workers_have_their_own_and_the_gone_are_forgotten() -> None:
    breakers, other = WorkerBreakers(POLICY), WorkerKey(WorkerId("d1"), Incarnation(1))
    for _ in range(3):
        breakers.failed(KEY, 0.0)
    breakers.failed(other, 0.0)
    breakers.succeeded(WorkerKey(WorkerId("d0"), Incarnation(2)), 0.0)
    assert breakers.closed_to(0.0) == {KEY}
    assert breakers.states(0.0) == {KEY: BreakerState.OPEN, other: BreakerState.CLOSED}
    breakers.began(KEY, 2.0)
    assert breakers.closed_to(2.0) == {KEY}
    breakers.released(KEY)
    assert breakers.closed_to(2.0) == set()
    breakers.keep([other])
    assert set(breakers.states(0.0)) == {other}
