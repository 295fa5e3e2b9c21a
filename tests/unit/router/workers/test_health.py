"""Which workers are excluded from requests."""

from router.types.worker_view import WorkerKey
from router.workers.health import WorkerBreakers
from tandem.backoff import Backoff
from tandem.circuit_breaker import BreakerPolicy, BreakerState
from tandem.values.ids import Incarnation, WorkerId

POLICY = BreakerPolicy(most_in_a_row=3, open=Backoff(first_s=2.0, most_s=6.0), probe_s=10.0)
KEY = WorkerKey(WorkerId("d0"), Incarnation(1))


def test_worker_breakers_are_per_worker_and_forget_departed() -> None:
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
