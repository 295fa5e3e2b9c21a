"""Forecasts: level, damped trend, a season learnt from one day, and measured errors."""

from math import cos, pi
from random import Random

import pytest

from cluster.planner.forecast import Forecaster, Smoothing
from tandem.errors import ConfigError


def fed(values: list[float], *, ahead: int = 5, season: int = 0) -> Forecaster:
    forecaster = Forecaster(Smoothing(), ahead=ahead, season=season)
    for value in values:
        forecaster.observe(value)
    return forecaster


def test_forecast_of_constant_load_is_exact() -> None:
    forecast = fed([4.0] * 100).ahead(5)
    assert forecast.value == pytest.approx(4.0)
    assert forecast.upper(3.0) == pytest.approx(4.0, abs=1e-6)


def test_forecast_extrapolates_ramp() -> None:
    forecaster = fed([0.1 * n for n in range(200)], ahead=5)
    assert forecaster.ahead(0).value < forecaster.ahead(5).value <= 20.5
    assert forecaster.ahead(5).value == pytest.approx(20.4, rel=0.05)


def test_forecast_noise_widens_band_around_level() -> None:
    rng = Random(5)
    calm, wild = (fed([10.0 + scale * rng.gauss(0, 1) for _ in range(400)]).ahead(5) for scale in (0.5, 3.0))
    assert 0.0 < calm.error < wild.error < 3.0
    assert abs(wild.value - 10.0) < 3.0 * wild.error


def test_forecast_learns_season_after_one_day() -> None:
    day = [10.0 + 6.0 * cos(2 * pi * n / 48) for n in range(48)]
    with_season, without = fed(day * 3, ahead=12, season=48), fed(day * 3, ahead=12)
    # Where the curve turns within the distance, only who knows the season can tell.
    errors = {name: [] for name in ("with", "without")}
    for n in range(48):
        truth = day[(n + 11) % 48]
        errors["with"].append(abs(with_season.ahead(12).value - truth))
        errors["without"].append(abs(without.ahead(12).value - truth))
        with_season.observe(day[n])
        without.observe(day[n])
    assert sum(errors["with"]) < 0.5 * sum(errors["without"])


def test_forecast_is_never_negative() -> None:
    assert fed([10.0 - 0.5 * n for n in range(21)]).ahead(50).value >= 0.0


@pytest.mark.parametrize("make", [lambda: Smoothing(level=0.0), lambda: Forecaster(Smoothing(), ahead=0)])
def test_forecast_invalid_options_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()
