"""When the tenant isolation bench reports a leak."""

from math import sqrt
from random import Random

import pytest

from tandem_bench.isolation.separation import Probe, Separation, leak_rows, median_ms
from tandem_bench.report import num_missed


def probes(count: int, *, gain: float, seed: int = 1, cached: int = 0) -> list[Probe]:
    """Times with a spread of 1; `gain`: by how much a prefix that was sent is faster."""
    rng = Random(seed)
    return [
        Probe(ttft_s=rng.gauss(10.0 - gain * (number % 2), 1.0), was_sent=number % 2 == 1, cached_tokens=cached)
        for number in range(count)
    ]


def by_pairs(found: list[Probe]) -> float:
    sent = [probe.ttft_s for probe in found if probe.was_sent]
    others = [probe.ttft_s for probe in found if not probe.was_sent]
    return sum((a < b) + (a == b) / 2 for a in sent for b in others) / (len(sent) * len(others))


def test_auc_counts_ordered_pairs_and_half_of_ties() -> None:
    rng = Random(3)
    for _ in range(50):
        found = [Probe(float(rng.randrange(5)), rng.random() < 0.4, 0) for _ in range(30)]
        found += [Probe(1.0, True, 0), Probe(1.0, False, 0)]
        assert Separation.from_probes(found).auc == pytest.approx(by_pairs(found))


def test_standard_error_matches_spread_without_leak() -> None:
    aucs = [Separation.from_probes(probes(200, gain=0.0, seed=seed)).auc for seed in range(300)]
    spread = sqrt(sum((auc - 0.5) ** 2 for auc in aucs) / len(aucs))
    assert Separation.from_probes(probes(200, gain=0.0)).standard_error == pytest.approx(spread, rel=0.15)


def test_separation_of_one_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="both kinds"):
        Separation.from_probes([Probe(1.0, True, 0)])


@pytest.mark.parametrize(("gain", "num_wrong"), [(0.0, 0), (0.2, 1), (-0.2, 1), (5.0, 1)])
def test_leak_of_either_direction_misses_the_goal(gain: float, num_wrong: int) -> None:
    assert num_missed(leak_rows(probes(2000, gain=gain))) == num_wrong


def test_leak_rows_of_few_probes_judge_only_cached_tokens() -> None:
    assert num_missed(leak_rows(probes(100, gain=5.0))) == 0
    assert num_missed(leak_rows(probes(100, gain=0.0, cached=1))) == 1


def test_median_ms_is_per_kind() -> None:
    found = [Probe(0.002, True, 0), Probe(0.004, True, 0), Probe(0.009, False, 0)]
    assert (median_ms(found, was_sent=True), median_ms(found, was_sent=False)) == (pytest.approx(3.0), 9.0)
