"""History from totals, and quantiles from buckets."""

import json
from random import Random

import pytest

from router.metrics.quantiles import FINE_BOUNDS_S, quantile
from router.status.snapshot.history import CounterTotals, History, step_from_json


class World:
    """A history on a virtual clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.history = History(clock=lambda: self.now_s, before=totals(7), step_s=5.0, num_steps=3)

    def take(self, now_s: float, tokens: float, *spread: int) -> None:
        self.now_s = now_s
        self.history.record(totals(tokens, spread))

    def tokens(self) -> dict[int, float]:
        return {step.number: step.numbers.get("tokens", 0.0) for step in self.history.steps()}


def totals(tokens: float, spread: tuple[int, ...] = ()) -> CounterTotals:
    return CounterTotals(numbers={"tokens": tokens}, spreads={"ttft": spread or (0, 0, 0)})


def test_history_increment_belongs_to_its_step() -> None:
    world = World()
    world.take(101.0, 10)
    world.take(104.0, 15, 1, 0, 0)
    world.take(105.0, 16, 1, 0, 4)
    world.take(116.0, 16, 1, 0, 4)
    assert world.tokens() == {20: 8.0, 21: 1.0}
    assert [step.spreads["ttft"] for step in world.history.steps()] == [{0: 1}, {2: 4}]


def test_history_excludes_initial_totals() -> None:
    world = World()
    world.take(101.0, 7)
    assert world.history.steps() == []


def test_history_fallen_total_counts_as_reset() -> None:
    world = World()
    world.take(101.0, 10)
    world.take(102.0, 4)
    world.take(103.0, 6)
    assert world.tokens() == {20: 5.0}


def test_history_forgets_old_steps_and_skips_gaps() -> None:
    world = World()
    for step in range(10):
        world.take(100.0 + 5 * step, 8.0 + step)
    assert list(world.tokens()) == [26, 27, 28, 29]
    world.now_s = 165.0
    assert list(world.tokens()) == []


def test_history_step_survives_serialization() -> None:
    world = World()
    world.take(101.0, 9, 0, 3, 1)
    (step,) = world.history.steps()
    assert step_from_json(json.loads(json.dumps(step.as_json()))) == step
    for broken in ([], [1, 2, 3], ["x", {}, {}], [1, {}, {"ttft": [1]}]):
        with pytest.raises((TypeError, ValueError)):
            step_from_json(broken)


def test_quantiles_from_buckets_are_near_exact() -> None:
    rng = Random(5)
    values = sorted(rng.lognormvariate(-4.0, 1.5) for _ in range(5000))
    counts: dict[int, int] = {}
    for value in values:
        index = next((i for i, bound in enumerate(FINE_BOUNDS_S) if value <= bound), len(FINE_BOUNDS_S))
        counts[index] = counts.get(index, 0) + 1
    for share in (0.01, 0.5, 0.95, 0.99):
        exact = values[int(share * len(values))]
        assert quantile(counts, FINE_BOUNDS_S, share) == pytest.approx(exact, rel=0.1)


def test_quantiles_without_values_or_beyond_bounds() -> None:
    assert quantile({}, FINE_BOUNDS_S, 0.5) is None
    assert quantile({3: 0}, FINE_BOUNDS_S, 0.5) is None
    assert quantile({len(FINE_BOUNDS_S): 2}, FINE_BOUNDS_S, 0.5) == FINE_BOUNDS_S[-1]
    assert 0.0 < (quantile({0: 4}, FINE_BOUNDS_S, 0.5) or 0.0) < FINE_BOUNDS_S[0]
