"""The circuit breaker: opens on failures, probes singly with jitter, closes after one good probe."""

from random import Random

from tandem.backoff import Backoff
from tandem.circuit_breaker import BreakerPolicy, BreakerState, CircuitBreaker

POLICY = BreakerPolicy(most_in_a_row=3, open=Backoff(first_s=2.0, most_s=6.0), probe_s=10.0)


def tripped() -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    return breaker


def test_circuit_breaker_consecutive_failures_open() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(20):
        for _ in range(3):
            breaker.succeeded(0.0)
        breaker.failed(0.0)
        breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert not tripped().allows(1.9)


def test_circuit_breaker_failure_share_opens() -> None:
    breaker = CircuitBreaker(POLICY)
    for number in range(12):
        (breaker.failed if number % 2 else breaker.succeeded)(float(number))
    assert breaker.state(12.0) is BreakerState.OPEN


def test_circuit_breaker_half_open_allows_one_probe() -> None:
    breaker = tripped()
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.allows(2.0)
    breaker.began(2.0)
    assert not breaker.allows(3.0)
    breaker.released()
    assert breaker.allows(3.0)
    breaker.began(3.0)
    assert breaker.allows(13.0)  # nothing was heard of that one


def test_circuit_breaker_probe_closes_or_doubles_timeout() -> None:
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


def test_circuit_breaker_ignores_old_requests_when_open() -> None:
    breaker = tripped()
    breaker.succeeded(1.0)
    breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert breaker.state(2.0) is BreakerState.HALF_OPEN


def test_circuit_breaker_jitter_is_half_to_full_timeout() -> None:
    breaker, now_s = CircuitBreaker(POLICY, Random(1)), 0.0
    for longest in (2.0, 4.0, 6.0, 6.0):
        for _ in range(3 if longest == 2.0 else 1):
            breaker.began(now_s)
            breaker.failed(now_s)
        assert longest / 2 <= breaker.wait_s(now_s) <= longest
        now_s += longest
        assert breaker.wait_s(now_s) == 0.0, "a probe is due"


def test_circuit_breakers_tripped_together_recover_at_different_times() -> None:
    waits = set()
    for seed in range(20):
        breaker = CircuitBreaker(POLICY, Random(seed))
        for _ in range(3):
            breaker.failed(0.0)
        waits.add(round(breaker.wait_s(0.0), 6))
    assert len(waits) == 20


def test_circuit_breaker_probe_times_out() -> None:
    breaker = tripped()
    breaker.began(2.0)
    assert breaker.wait_s(5.0) == 7.0
