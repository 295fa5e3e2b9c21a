"""Counts sampled stacks, and exports them in the formats of profile viewers. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

MAX_DEPTH = 128
MAX_STACKS = 20_000
CUT, OTHER = "(deeper)", "(other stacks)"


class StackTally:
    """Counts samples of stacks, outermost frame first. Stacks beyond `max_stacks` are counted together."""

    def __init__(self, *, max_stacks: int = MAX_STACKS) -> None:
        self._max_stacks = max_stacks
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.num_samples = 0

    def add(self, stack: Sequence[str], count: int = 1) -> None:
        """Count samples of one thread."""
        kept = tuple(stack) if len(stack) <= MAX_DEPTH else (*stack[: MAX_DEPTH - 1], CUT)
        if kept not in self._counts and len(self._counts) >= self._max_stacks:
            kept = (OTHER,)
        self._counts[kept] += count
        self.num_samples += count

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Iterate over (stack, number of samples), sorted by names."""
        return iter(sorted(self._counts.items()))


def collapsed(tally: StackTally) -> str:
    """Export one line per stack: frames, outermost first and separated by semicolons, and the count."""
    return "".join(f"{';'.join(frame.replace(';', ':') for frame in stack)} {count}\n" for stack, count in tally)


def speedscope(tally: StackTally, *, name: str, period_s: float) -> dict[str, Any]:
    """Export in speedscope's file format; a sample weighs `period_s`."""
    indices: dict[str, int] = {}
    samples = [[indices.setdefault(frame, len(indices)) for frame in stack] for stack, _ in tally]
    weights = [count * period_s for _, count in tally]
    profile = {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "shared": {"frames": [{"name": frame} for frame in indices]},
        "profiles": [profile],
    }
