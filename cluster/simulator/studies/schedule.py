"""The best fixed schedule in hindsight: sizes of both pools for each window of a day, chosen with knowledge of the day.

Each window is simulated alone with every pair of sizes that can matter: total by total down from a guess until every
split exceeds the whole day's allowance by itself, and up until one split breaches hardly anything, or no more than a
cluster of twice the size. Sizes no larger in either pool than a pair that exceeded it are assumed to exceed it, too.
Then the cheapest choice of pairs is found whose breaches together stay within the day's allowance: exactly, by dynamic
programming over the counts. Windows alone may differ from windows in a row, so the whole day is simulated with the
choice, and the choice is repeated with a smaller allowance until it holds.

The schedule is chosen by its sizes alone; its cost with machines that start and drain is reported separately.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.planner.values import Sizes
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.finished import ttft_s
from cluster.simulator.model.report import HELD_SHARE
from cluster.simulator.model.router import Outcomes
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.elastic import Elastic, ElasticReport, Scheduled, run_elastic, sized
from tandem.errors import ConfigError

_UNITS = 400
"""Number of units of an allowance; breaches are rounded up to units."""
_MOST = 64
"""Maximum number of workers that are tried."""
_HARDLY = 1.0
"""Share of a window's part of the gap allowance below which fewer breaches are not searched for."""
_TIGHTER = 0.8
_MAX_TRIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaches:
    """Late requests and gaps of one window, or of a day."""

    num_late: float = 0.0
    num_gaps: float = 0.0

    def plus(self, other: "Breaches") -> "Breaches":
        return Breaches(num_late=self.num_late + other.num_late, num_gaps=self.num_gaps + other.num_gaps)

    def within(self, allowed: "Breaches") -> bool:
        """Return whether both counts are within their allowances."""
        return self.num_late <= allowed.num_late and self.num_gaps <= allowed.num_gaps


Option = tuple[Sizes, Breaches]
"""Sizes of one window, and their breaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSchedule:
    windows: tuple[Sizes, ...]
    window_s: float
    machine_hours: float
    """Machine time of the sizes alone."""
    verified: ElasticReport
    """Simulation of the whole day with these sizes, which meets the SLO."""
    num_simulated: int
    """Number of windows simulated, each with one pair of sizes."""
    num_tries: int
    """Number of choices until one held."""


@dataclass(slots=True, kw_only=True)
class ScheduleSearch:
    """Search of one day. Windows are tried around the sizes of `guess`; the search goes as far as necessary."""

    elastic: Elastic
    window_s: float
    lead_s: float
    """Lead time: load before a window that is simulated with it, so that the window does not start empty."""
    guess: Callable[[Trace], Sizes]
    say: Callable[[str], None]
    splits: int = 2
    """Range of prefill workers that are tried above and below the guess."""
    num_simulated: int = 0

    def run(self) -> BestSchedule:
        """Run the search. ConfigError when no schedule meets the SLO."""
        options = [self._options(window) for window in self._windows()]
        allowed = self._allowed(1.0)
        for attempt in range(1, _MAX_TRIES + 1):
            windows = cheapest(options, allowed)
            hours = sum(sizes.total for sizes in windows) * self.window_s / 3600.0
            verified = run_elastic(self.elastic, Scheduled(windows, self.window_s, self.elastic.timing), windows[0])
            report = verified.report
            self.say(f"{hours:.2f} machine-hours: TTFT {report.ttft_within:.4f}, ITL {report.itl_within:.4f} within")
            if report.held:
                return BestSchedule(
                    windows=windows,
                    window_s=self.window_s,
                    machine_hours=hours,
                    verified=verified,
                    num_simulated=self.num_simulated,
                    num_tries=attempt,
                )
            allowed = self._allowed(_TIGHTER**attempt)
        raise ConfigError("found no fixed schedule that meets the SLO")

    def breaches(self, window: Trace, sizes: Sizes) -> Breaches:
        """Count the breaches of one window with these sizes, without its lead; stops once they exceed the day's
        allowance.
        """
        self.num_simulated += 1
        simulation = Simulation(sized(self.elastic.spec, sizes), window, Choosing(), seed=self.elastic.seed)
        begin_s, slo = window.requests[-1].arrival_s - self.window_s, self.elastic.slo
        late, most = _LateCount(simulation.router.outcomes, begin_s, slo.ttft_s), self._allowed(1.0).num_late
        simulation.is_decided = lambda: late.now() > most
        simulation.run()
        share = min(1.0, self.window_s / max(window.span_s, 1e-9))
        return Breaches(num_late=late.now(), num_gaps=share * simulation.workers.gaps.num_beyond(slo.itl_s))

    def _windows(self) -> Iterator[Trace]:
        requests = self.elastic.trace.requests
        start_s = 0.0
        while start_s < requests[-1].arrival_s:
            end_s, lead_s = start_s + self.window_s, start_s - self.lead_s
            part = tuple(r for r in requests if lead_s <= r.arrival_s < end_s)
            if any(r.arrival_s >= start_s for r in part):
                trace = self.elastic.trace
                yield Trace(name=trace.name, block_tokens=trace.block_tokens, requests=part).stretched(1.0)
            start_s = end_s

    def _allowed(self, share: float) -> Breaches:
        trace, late = self.elastic.trace, share * (1.0 - HELD_SHARE)
        return Breaches(num_late=late * len(trace.requests), num_gaps=late * trace.num_output_tokens)

    def _options(self, window: Trace) -> list[Option]:
        guess = self.guess(window)
        tried = dict[Sizes, Breaches]()
        total = guess.total
        while total >= 2 and self._any_holds(self._try(window, guess, total, tried)):
            total -= 1
        total = guess.total
        calm = self._calm(Breaches())
        if not _any_within(tried, calm):
            calm = self._calm(self.breaches(window, Sizes(prefill=2 * guess.prefill, decode=2 * guess.decode)))
        while total < _MOST and not _any_within(tried, calm):
            total += 1
            self._try(window, guess, total, tried)
        allowed = self._allowed(1.0)
        options = [(sizes, breaches) for sizes, breaches in tried.items() if breaches.within(allowed)]
        tried_sizes = ", ".join(f"{sizes} {b.num_late:g} late {b.num_gaps:.0f} gaps" for sizes, b in options)
        self.say(f"{len(window.requests)} requests, guessed {guess}: {tried_sizes}")
        return options

    def _try(self, window: Trace, guess: Sizes, total: int, tried: dict[Sizes, Breaches]) -> list[Breaches]:
        """Simulate every split of so many workers whose breaches are not known yet."""
        low, high = max(1, guess.prefill - self.splits), min(total - 1, guess.prefill + self.splits)
        for sizes in [Sizes(prefill=p, decode=total - p) for p in range(low, high + 1)]:
            if not self._is_hopeless(sizes, tried):
                tried[sizes] = self.breaches(window, sizes)
        return [breaches for sizes, breaches in tried.items() if sizes.total == total]

    def _is_hopeless(self, sizes: Sizes, tried: dict[Sizes, Breaches]) -> bool:
        allowed = self._allowed(1.0)
        return any(
            sizes.prefill <= more.prefill and sizes.decode <= more.decode and not breaches.within(allowed)
            for more, breaches in tried.items()
        )

    def _any_holds(self, found: list[Breaches]) -> bool:
        allowed = self._allowed(1.0)
        return any(breaches.within(allowed) for breaches in found)

    def _calm(self, base: Breaches) -> Breaches:
        """Return the larger of negligible breaches and `base`, as a bound."""
        num_windows = self.elastic.trace.requests[-1].arrival_s / self.window_s
        hardly = _HARDLY * self._allowed(1.0).num_gaps / num_windows
        return Breaches(num_late=base.num_late + 0.5, num_gaps=max(base.num_gaps, hardly))


class _LateCount:
    """Count of a window's requests, without its lead, without a first token in time; each is examined once."""

    def __init__(self, outcomes: Outcomes, begin_s: float, ttft_s: float) -> None:
        self._outcomes = outcomes
        self._begin_s = begin_s
        self._ttft_s = ttft_s
        self._num_seen = self._num_late = 0

    def now(self) -> int:
        """Count them, including rejected and failed requests."""
        finished = self._outcomes.finished
        for index in range(self._num_seen, len(finished)):
            request = finished[index]
            self._num_late += request.arrived_s > self._begin_s and ttft_s(request) > self._ttft_s
        self._num_seen = len(finished)
        return self._num_late + self._outcomes.num_rejected + self._outcomes.num_failed


def _any_within(tried: dict[Sizes, Breaches], bound: Breaches) -> bool:
    return any(breaches.within(bound) for breaches in tried.values())


def cheapest(options: Sequence[list[Option]], allowed: Breaches) -> tuple[Sizes, ...]:
    """Choose one option per window with the fewest workers, such that all breaches together are allowed.

    For every pair of units of both allowances the fewest workers are kept, window by window. ConfigError if none do.
    """
    fewest = np.zeros((_UNITS + 1, _UNITS + 1))
    chosen: list[np.ndarray] = []
    for window in options:
        costs = np.full((len(window) + 1, *fewest.shape), np.inf)
        for row, (sizes, breaches) in enumerate(window):
            late, gaps = _units(breaches, allowed)
            if max(late, gaps) <= _UNITS:
                costs[row, late:, gaps:] = fewest[: _UNITS + 1 - late, : _UNITS + 1 - gaps] + sizes.total
        fewest = costs.min(axis=0)
        chosen.append(costs.argmin(axis=0))
    if not np.isfinite(fewest[_UNITS, _UNITS]):
        raise ConfigError("no fixed schedule meets the SLO with the sizes that were tried")
    late = gaps = _UNITS
    windows: list[Sizes] = []
    for window, choice in zip(reversed(options), reversed(chosen), strict=True):
        sizes, breaches = window[int(choice[late, gaps])]
        windows.append(sizes)
        used = _units(breaches, allowed)
        late, gaps = late - used[0], gaps - used[1]
    return tuple(reversed(windows))


def _units(breaches: Breaches, allowed: Breaches) -> tuple[int, int]:
    late = np.ceil(_UNITS * breaches.num_late / max(allowed.num_late, 1e-9))
    gaps = np.ceil(_UNITS * breaches.num_gaps / max(allowed.num_gaps, 1e-9))
    return int(late), int(gaps)
