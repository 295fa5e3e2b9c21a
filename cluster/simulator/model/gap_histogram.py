"""Compact statistics of a simulation: a million requests have hundreds of millions of gaps between tokens."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import exp, floor, log

_STEP = 0.01
"""Width of a bucket on the logarithmic scale: percentiles of gaps are accurate to half a percent."""


class GapHistogram:
    """Histogram of gaps between tokens, on a logarithmic scale."""

    __slots__ = ("_buckets", "_count", "_total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._total = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, gap_s: float, count: int = 1) -> None:
        """Add a number of equal gaps."""
        self._buckets[floor(log(max(gap_s, 1e-9)) / _STEP)] += count
        self._count += count
        self._total += gap_s * count

    @property
    def mean_s(self) -> float:
        """Mean gap in seconds; 0 without gaps."""
        return self._total / self._count if self._count else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile of the gaps; 0 without gaps."""
        left = self._count * percent / 100
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return exp((bucket + 0.5) * _STEP)
        return 0.0

    def share_within(self, gap_s: float) -> float:
        """Return the share of gaps at most this long; 1 without gaps."""
        return 1.0 - self.num_beyond(gap_s) / self._count if self._count else 1.0

    def num_beyond(self, gap_s: float) -> int:
        """Count the gaps that are longer."""
        bound = floor(log(max(gap_s, 1e-9)) / _STEP)
        return sum(n for b, n in self._buckets.items() if b > bound)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, by linear interpolation; 0 without values."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def share_within(ordered: Sequence[float], bound: float) -> float:
    """Return the share of sorted values that are at most `bound`; 1 without values."""
    return bisect_left(ordered, bound + 1e-12) / len(ordered) if ordered else 1.0
