"""What was counted in each of the last steps of time: rings of differences, from totals that only grow. Pure.

Steps are numbered by the clock, so the histories of processes that share a clock can be added up step by step. Nothing
is counted for this alone: the history follows from sampling the totals often enough.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

STEP_S = 5.0
NUM_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTotals:
    """Counts since the process began."""

    numbers: Mapping[str, float]
    spreads: Mapping[str, Sequence[int]]
    """Of histograms: observations by bucket."""


@dataclass(slots=True)
class HistoryStep:
    """What one step added."""

    number: int
    numbers: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, dict[int, int]] = field(default_factory=dict)
    """Buckets with nothing new are left out."""

    def add(self, before: CounterTotals, now: CounterTotals) -> None:
        """What `now` has more. A total that fell began anew, as a worker's does when it is restarted."""
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
        """For another process; see `step_from_json`."""
        spreads = {name: list(counts.items()) for name, counts in self.spreads.items()}
        return [self.number, self.numbers, spreads]


def step_from_json(value: Sequence[object]) -> HistoryStep:
    """What `as_json` wrote. Raises ValueError or TypeError for anything else."""
    number, numbers, spreads = value
    if not (isinstance(number, int) and isinstance(numbers, dict) and isinstance(spreads, dict)):
        raise ValueError("no step of a history")
    pairs = {str(name): {int(i): int(count) for i, count in counts} for name, counts in spreads.items()}
    return HistoryStep(number, {str(name): float(number) for name, number in numbers.items()}, pairs)


class History:
    """The last steps, the one under way included."""

    def __init__(
        self, *, clock: Callable[[], float], before: CounterTotals, step_s: float = STEP_S, num_steps: int = NUM_STEPS
    ) -> None:
        """`before`: totals that were reached already, which belong to no step."""
        self.step_s = step_s
        self._clock = clock
        self._before = before
        # One more: the step under way is no whole one yet.
        self._steps: deque[HistoryStep] = deque(maxlen=num_steps + 1)
        self._num_steps = num_steps

    def record(self, now: CounterTotals) -> None:
        """The totals of now: what is new belongs to the step of now."""
        number = floor(self._clock() / self.step_s)
        if not self._steps or self._steps[-1].number < number:
            self._steps.append(HistoryStep(number))
        self._steps[-1].add(self._before, now)
        self._before = now

    def steps(self) -> list[HistoryStep]:
        """Those in which something was counted and that are not too long ago, the oldest first."""
        oldest = floor(self._clock() / self.step_s) - self._num_steps
        return [step for step in self._steps if step.number >= oldest and (step.numbers or any(step.spreads.values()))]
