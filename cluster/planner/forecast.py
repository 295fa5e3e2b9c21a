"""Forecast of the request rate: a level, a damped trend, a season if there is enough history, and the error.

Additive Holt-Winters (Holt 1957, Winters 1960) with Gardner and McKenzie's damped trend (1985): a trend observed for
minutes says little about the next hour. The error is measured, not assumed: each forecast is compared with the level
once its time has come. So it excludes the scatter of single periods, which the queueing formulas cover.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """Smoothing factors per period."""

    level: float = 0.1
    trend: float = 0.03
    season: float = 0.3
    damping: float = 0.95
    error: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.level, self.trend, self.season, self.damping, self.error)
        if not all(0.0 < share <= 1.0 for share in shares):
            raise ConfigError("smoothing factors must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    value: float
    error: float
    """Standard error of `value`."""

    def upper(self, band: float) -> float:
        """Return the value plus so many standard errors."""
        return max(0.0, self.value + band * self.error)


class Forecaster:
    """Forecasts one series with equal periods, from the value of each period in order."""

    def __init__(self, smoothing: Smoothing, *, ahead: int, season: int = 0) -> None:
        """`ahead`: periods for which errors are measured. `season`: periods per day; 0: no season."""
        if ahead < 1 or season < 0:
            raise ConfigError(f"ahead must be at least 1 and season at least 0, got {ahead} and {season}")
        self._smoothing = smoothing
        self._ahead = ahead
        self._season = season
        self._first_day: list[float] = []
        self._seasonal: list[float] = []
        """Seasonal component by period of the day; empty until a whole day was observed."""
        self._num_seen = 0
        self._level = 0.0
        self._trend = 0.0
        self._variance = 0.0
        self._pending: deque[float] = deque()
        """Forecasts of times to come, without their seasonal component."""

    def observe(self, value: float) -> None:
        """Record the value of one more period."""
        smoothing, place = self._smoothing, self._place(0)
        season = 0.0 if place is None else self._seasonal[place]
        before = self._level
        # The first periods are averaged, since the first one alone is no reliable level.
        weight = max(smoothing.level, 1.0 / (self._num_seen + 1))
        expected = before + smoothing.damping * self._trend
        self._level = expected + weight * (value - season - expected)
        if self._num_seen > 1.0 / smoothing.level:
            step = self._level - before
            self._trend = smoothing.trend * step + (1.0 - smoothing.trend) * smoothing.damping * self._trend
        if place is not None:
            self._seasonal[place] += smoothing.season * (value - self._level - season)
        self._num_seen += 1
        self._judge()
        if self._season and not self._seasonal:
            self._learn(value)

    def ahead(self, periods: int) -> Forecast:
        """Forecast the value so many periods after the last observed; 0: the present level."""
        place = self._place(periods - 1)
        season = 0.0 if place is None else self._seasonal[place]
        return Forecast(value=max(0.0, self._smooth(periods) + season), error=sqrt(self._variance))

    def _smooth(self, periods: int) -> float:
        damping = self._smoothing.damping
        total = periods if damping == 1.0 else damping * (1.0 - damping**periods) / (1.0 - damping)
        return self._level + total * self._trend

    def _place(self, periods: int) -> int | None:
        """Return the period's index in the day, counted from the next one to be observed; None without a season."""
        return (self._num_seen + periods) % len(self._seasonal) if self._seasonal else None

    def _learn(self, value: float) -> None:
        """Initialize the season once the first day is complete: the level is its mean, the season the deviations."""
        self._first_day.append(value)
        if len(self._first_day) < self._season:
            return
        self._level = sum(self._first_day) / self._season
        self._trend = 0.0
        self._seasonal = [seen - self._level for seen in self._first_day]
        self._pending.clear()
        self._first_day.clear()

    def _judge(self) -> None:
        """Compare the forecast that was made for now with the actual level."""
        self._pending.append(self._smooth(self._ahead))
        if len(self._pending) > self._ahead:
            error = self._level - self._pending.popleft()
            share = self._smoothing.error
            self._variance = (1.0 - share) * self._variance + share * error * error
