"""How many requests a second will come: a level, a damped trend, a season if there is history, and how wrong that was.

Additive Holt-Winters (Holt 1957, Winters 1960) with Gardner and McKenzie's damped trend (1985): a trend that was seen
for minutes says little of the hour. The band is measured, not assumed: what was said for a moment is compared with the
level when the moment has come. So it does not hold the scatter of single periods, which is the queue's business.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """How fast the past is forgotten, by period."""

    level: float = 0.1
    trend: float = 0.03
    season: float = 0.3
    damping: float = 0.95
    error: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.level, self.trend, self.season, self.damping, self.error)
        if not all(0.0 < share <= 1.0 for share in shares):
            raise ConfigError("smoothing is by shares above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    value: float
    error: float
    """Standard error of `value`."""

    def upper(self, band: float) -> float:
        """Above so many standard errors."""
        return max(0.0, self.value + band * self.error)


class Forecaster:
    """Of one series with equal periods. Told each period's value in order; asked for the value some periods ahead."""

    def __init__(self, smoothing: Smoothing, *, ahead: int, season: int = 0) -> None:
        """`ahead`: for which distance errors are measured. `season`: periods of a day; 0: no season is looked for."""
        if ahead < 1 or season < 0:
            raise ConfigError("a forecast looks at least one period ahead, and no season is below 0")
        self._smoothing = smoothing
        self._ahead = ahead
        self._season = season
        self._first_day: list[float] = []
        self._seasonal: list[float] = []
        """By period of the day; empty until a whole one was seen."""
        self._num_seen = 0
        self._level = 0.0
        self._trend = 0.0
        self._variance = 0.0
        self._said: deque[float] = deque()
        """Forecasts whose moment has not come: without what is the season's."""

    def observe(self, value: float) -> None:
        """One more period has passed."""
        smoothing, place = self._smoothing, self._place(0)
        season = 0.0 if place is None else self._seasonal[place]
        before = self._level
        # The first periods are averaged: the first one alone is no level.
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
        """What is to come so many periods after the last that was told; 0: the level now."""
        place = self._place(periods - 1)
        season = 0.0 if place is None else self._seasonal[place]
        return Forecast(value=max(0.0, self._smooth(periods) + season), error=sqrt(self._variance))

    def _smooth(self, periods: int) -> float:
        damping = self._smoothing.damping
        total = periods if damping == 1.0 else damping * (1.0 - damping**periods) / (1.0 - damping)
        return self._level + total * self._trend

    def _place(self, periods: int) -> int | None:
        """Of a period, counted from the next that is told."""
        return (self._num_seen + periods) % len(self._seasonal) if self._seasonal else None

    def _learn(self, value: float) -> None:
        """Once the first day is whole: its mean is the level, what its periods differ from that is the season."""
        self._first_day.append(value)
        if len(self._first_day) < self._season:
            return
        self._level = sum(self._first_day) / self._season
        self._trend = 0.0
        self._seasonal = [seen - self._level for seen in self._first_day]
        self._said.clear()
        self._first_day.clear()

    def _judge(self) -> None:
        """Compare what was said for now with what is."""
        self._said.append(self._smooth(self._ahead))
        if len(self._said) > self._ahead:
            error = self._level - self._said.popleft()
            share = self._smoothing.error
            self._variance = (1.0 - share) * self._variance + share * error * error
