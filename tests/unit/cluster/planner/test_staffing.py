"""Staffing formulas against a hand-simulated queue, and their monotonicity."""

import heapq
from random import Random

import pytest

from cluster.planner.staffing import chance_to_wait, late_share
from tests.support.cluster.planned_worker import demand, staffing


def waited(count: int, rate: float, left_s: float, seed: int, num: int = 120_000) -> tuple[float, float]:
    """Shares of a queue with exponential service of mean 1 that wait at all, and longer than `left_s`."""
    rng, now, late, waits = Random(seed), 0.0, 0, 0
    free = [0.0] * count
    for _ in range(num):
        now += rng.expovariate(rate)
        begin = max(now, heapq.heappop(free))
        heapq.heappush(free, begin + rng.expovariate(1.0))
        waits += begin > now
        late += begin - now > left_s
    return waits / num, late / num


@pytest.mark.parametrize(("count", "rate"), [(1, 0.6), (3, 2.2), (8, 5.5)])
def test_staffing_wait_matches_simulated_queue(count: int, rate: float) -> None:
    waits, late = waited(count, rate, 1.0, seed=count)
    assert chance_to_wait(count, rate) == pytest.approx(waits, abs=0.03)
    assert late_share(count, rate, 1.0, 1.0) == pytest.approx(late, abs=0.03)


def test_staffing_overloaded_servers_are_always_late() -> None:
    assert late_share(3, 3.0, 1.0, 10.0) == 1.0
    assert late_share(3, 0.0, 1.0, 10.0) == 0.0


def test_staffing_grows_monotonically_with_load() -> None:
    sizes = [staffing().sizes(rate / 4, demand(10.0)) for rate in range(1, 40)]
    assert [s.prefill for s in sizes] == sorted(s.prefill for s in sizes)
    assert [s.decode for s in sizes] == sorted(s.decode for s in sizes)
    assert sizes[-1].prefill > sizes[0].prefill
    assert sizes[-1].decode > sizes[0].decode


def test_staffing_prompts_need_prefill_and_answers_need_decode() -> None:
    plain = staffing().sizes(3.0, demand(10.0))
    assert staffing().sizes(3.0, demand(10.0, prompt=4_000)).prefill > plain.prefill
    answers = staffing().sizes(3.0, demand(10.0, output=800))
    assert answers.decode > plain.decode
    assert answers.prefill == plain.prefill


def test_staffing_step_longer_than_objective_exceeds_any_pool() -> None:
    assert staffing().decode(2.0, demand(10.0, prompt=49_000, output=1_500), 20) > 10
