"""What the soak reports as growth: a leak within the noise, and nothing periodic."""

from collections.abc import Callable
from random import Random

import pytest

from tandem_bench.report import num_missed
from tandem_bench.soak.growth import MB, MIN_SAMPLES, Life, Sample, slope

HOUR_S = 3600.0


def life(
    *,
    hours: float,
    own_mb: Callable[[float], float],
    shared_mb: Callable[[float], float] = lambda _: 64.0,
    num_files: Callable[[float], int] = lambda _: 20,
    num_samples: int = 400,
) -> Life:
    """`own_mb`, `shared_mb` and `num_files` after so many hours."""
    made = Life(name="router 0", pid=7)
    for number in range(num_samples):
        at = hours * number / (num_samples - 1)
        made.samples.append(
            Sample(
                at_s=100.0 + at * HOUR_S,
                own_bytes=int(own_mb(at) * MB),
                shared_bytes=int(shared_mb(at) * MB),
                num_files=num_files(at),
                num_threads=12,
            )
        )
    return made


def noisy(mb_per_hour: float) -> Callable[[float], float]:
    """Growth beneath some megabytes of transient request memory, and a warm-up of fifty."""
    rng = Random(1)
    return lambda at: 100 + min(50.0, 500 * at) + mb_per_hour * at + rng.choice((0, 0, 0, 0.2, 8.0)) + rng.random() / 4


@pytest.mark.parametrize(("mb_per_hour", "num_wrong"), [(0.0, 0), (0.7, 0), (1.5, 1), (40.0, 1), (-5.0, 0)])
def test_soak_growth_is_distinguished_from_noise(mb_per_hour: float, num_wrong: int) -> None:
    rows = life(hours=2.0, own_mb=noisy(mb_per_hour)).rows(warm_up_s=0.25 * HOUR_S, least_s=HOUR_S)
    found = {row.name: row for row in rows}
    assert found["router 0: growth of own memory"].value == pytest.approx(mb_per_hour, abs=0.2)
    assert found["router 0: growth of own memory"].goal == "<= 1"
    assert num_missed(rows) == num_wrong


def test_growth_in_the_second_half_tells_what_fills_up_from_what_leaks() -> None:
    def late(own_mb: Callable[[float], float]) -> float:
        rows = life(hours=2.0, own_mb=own_mb).rows(warm_up_s=0.0, least_s=60.0)
        return next(row.value for row in rows if row.name.endswith("in the second half"))

    assert late(lambda at: 100 + min(50.0, 100 * at)) == 0.0
    assert late(lambda at: 100 + 3 * at) == pytest.approx(3.0)


def test_short_soak_is_judged_by_a_megabyte_in_total() -> None:
    def wrong(mb_per_hour: float) -> int:
        one = life(hours=0.1, own_mb=lambda at: 100 + mb_per_hour * at)
        return num_missed(one.rows(warm_up_s=0.0, least_s=60.0))

    assert [wrong(mb_per_hour) for mb_per_hour in (9.0, 11.0)] == [0, 1]


POOL_MB = 32


def test_soak_pools_of_peers_that_come_and_go_are_no_growth() -> None:
    """Peers are killed each minute in turn: two or three pools are mapped, and in the end three for longer."""
    mapped = life(hours=0.09, own_mb=lambda _: 180.0, shared_mb=lambda at: POOL_MB * (2 + (int(at * 60) in {1, 4, 5})))
    assert num_missed(mapped.rows(warm_up_s=0.0, least_s=60.0)) == 0


def test_soak_pools_that_stay_mapped_are_growth() -> None:
    """Every second minute a pool more, as if those of dead peers were never unmapped."""
    mapped = life(hours=0.09, own_mb=lambda _: 180.0, shared_mb=lambda at: POOL_MB * (2 + int(at * 60) // 2))
    rows = mapped.rows(warm_up_s=0.0, least_s=60.0)
    assert [row.name for row in rows if row.met is False] == ["router 0: growth of shared memory"]


def test_soak_open_files_count_as_growth() -> None:
    rows = life(hours=2.0, own_mb=lambda _: 100.0, num_files=lambda at: 20 + int(10 * at)).rows(
        warm_up_s=0.0, least_s=HOUR_S
    )
    assert [row.name for row in rows if row.met is False] == ["router 0: growth of open files"]


def test_soak_short_lived_process_is_not_judged() -> None:
    brief = life(hours=0.5, own_mb=lambda at: 100 + 1000 * at)
    assert brief.rows(warm_up_s=0.1 * HOUR_S, least_s=0.5 * HOUR_S) == []
    few = life(hours=2.0, own_mb=lambda at: 100 + 1000 * at, num_samples=MIN_SAMPLES - 1)
    assert few.rows(warm_up_s=0.0, least_s=HOUR_S) == []
    assert Life(name="x", pid=1).rows(warm_up_s=0.0, least_s=0.0) == []


def test_slope_of_single_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="two moments"):
        slope([1.0, 1.0], [2.0, 3.0])
