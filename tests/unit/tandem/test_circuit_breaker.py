"""The breaker: at will while all is well, rarely and at odd times while not, at will again after one good probe."""

from random import Random

from tandem.circuit_breaker import BreakerPolicy, CircuitBreaker

POLICY = BreakerPolicy(max_failures=2, first_open_s=1.0, most_open_s=8.0)


def test_it_opens_after_failures_in_a_row_and_waits_longer_after_each_probe() -> None:
    breaker = CircuitBreaker(Random(1), POLICY)
    breaker.failed(10.0)
    assert breaker.wait_s(10.0) == 0.0, "one failure is no pattern"
    for longest in (1.0, 2.0, 4.0, 8.0, 8.0):
        breaker.failed(10.0)
        assert not breaker.is_closed
        assert longest / 2 <= breaker.wait_s(10.0) <= longest
        assert breaker.wait_s(10.0 + longest) == 0.0, "a probe is due"


def test_one_good_probe_closes_it() -> None:
    breaker = CircuitBreaker(Random(1), POLICY)
    for _ in range(9):
        breaker.failed(0.0)
    breaker.succeeded()
    assert breaker.is_closed
    breaker.failed(0.0)
    assert breaker.wait_s(0.0) == 0.0


def test_those_that_failed_together_do_not_come_back_together() -> None:
    waits = set()
    for seed in range(20):
        breaker = CircuitBreaker(Random(seed), POLICY)
        breaker.failed(0.0)
        breaker.failed(0.0)
        waits.add(round(breaker.wait_s(0.0), 6))
    assert len(waits) == 20
