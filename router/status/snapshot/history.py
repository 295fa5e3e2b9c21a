"""A history of counters over the last time steps: rings of differences, from totals that only grow. Pure.

Steps are numbered by the clock, so the histories of processes that share a clock can be added step by step. No counter
exists for this alone: the history is made by sampling the totals often enough.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

STEP_S = 5.0
NUM_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTotals:
    """Totals since the process began."""

    numbers: Mapping[str, float]
    spreads: Mapping[str, Sequence[int]]
    """Observations by bucket, for each histogram."""


@dataclass(slots=True)
class HistoryStep:
    """The increments during one step."""

    number: int
    numbers: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, dict[int, int]] = field(default_factory=dict)
    """Buckets without increments are left out."""

    def add(self, before: CounterTotals, now: CounterTotals) -> None:
        """Add the increments from `before` to `now`. A total that fell was reset, as a worker's is when it restarts."""
        for name, value in now.numbers.items():
            grown = value - before.numbers.get(name, 0.0)
            if grown > 0:
                self.numbers[name] = self.numbers.get(name, 0.0) + grown
        for name, counts in now.spreads.items():
            old = before.spreads.get(name) or [0] * len(counts)
            mine = self.spreads.setdefault(name, {})
            for index, (then, count) in enumerate(zip(old, counts, strict=True)):
                if count > then:
                    mine[index] = mine.get(index, 0) + count - then

    def as_json(self) -> list[object]:
        """Serialize for another process; see `step_from_json`."""
        spreads = {name: list(counts.items()) for name, counts in self.spreads.items()}
        return [self.number, self.numbers, spreads]


def step_from_json(value: Sequence[object]) -> HistoryStep:
    """Parse what `as_json` wrote. Raises ValueError or TypeError for anything else."""
    number, numbers, spreads = value
    if not (isinstance(number, int) and isinstance(numbers, dict) and isinstance(spreads, dict)):
        raise ValueError("not a history step")
    pairs = {str(name): {int(i): int(count) for i, count in counts} for name, counts in spreads.items()}
    return HistoryStep(number, {str(name): float(number) for name, number in numbers.items()}, pairs)


class History:
    """The last steps, including the current one."""

    def __init__(
        self, *, clock: Callable[[], float], before: CounterTotals, step_s: float = STEP_S, num_steps: int = NUM_STEPS
    ) -> None:
        """`before`: totals reached before the history begins, which belong to no step."""
        self.step_s = step_s
        self._clock = clock
        self._before = before
        # One more, because the current step is incomplete.
        self._steps: deque[HistoryStep] = deque(maxlen=num_steps + 1)
        self._num_steps = num_steps

    def record(self, now: CounterTotals) -> None:
        """Record the current totals: their increments belong to the current step."""
        number = floor(self._clock() / self.step_s)
        if not self._steps or self._steps[-1].number < number:
            self._steps.append(HistoryStep(number))
        self._steps[-1].add(self._before, now)
        self._before = now

    def steps(self) -> list[HistoryStep]:
        """Return the recent steps in which anything was counted, the oldest first."""
        oldest = floor(self._clock() / self.step_s) - self._num_steps
        return [step for step in self._steps if step.number >= oldest and (step.numbers or any(step.spreads.values()))]
