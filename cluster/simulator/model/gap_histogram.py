"""What a simulation measures, kept small: a million requests have hundreds of millions of gaps between tokens."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import exp, floor, log

_STEP = 0.01
"""Of a bucket's logarithm: percentiles of gaps are right to half a percent."""


class GapHistogram:
    """Gaps between tokens, by logarithm."""

    __slots__ = ("_buckets", "_count", "_total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._total = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, gap_s: float, count: int = 1) -> None:
        """So many gaps of one length."""
        self._buckets[floor(log(max(gap_s, 1e-9)) / _STEP)] += count
        self._count += count
        self._total += gap_s * count

    @property
    def mean_s(self) -> float:
        """0 when there is none."""
        return self._total / self._count if self._count else 0.0

    def percentile(self, percent: float) -> float:
        """0 when there is none."""
        left = self._count * percent / 100
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return exp((bucket + 0.5) * _STEP)
        return 0.0

    def share_within(self, gap_s: float) -> float:
        """Of all gaps; 1 when there is none."""
        return 1.0 - self.num_beyond(gap_s) / self._count if self._count else 1.0

    def num_beyond(self, gap_s: float) -> int:
        """Gaps that are longer."""
        bound = floor(log(max(gap_s, 1e-9)) / _STEP)
        return sum(n for b, n in self._buckets.items() if b > bound)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, by linear interpolation; 0 when there is none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def share_within(ordered: Sequence[float], bound: float) -> float:
    """Of sorted values, those at most `bound`; 1 when there is none."""
    return bisect_left(ordered, bound + 1e-12) / len(ordered) if ordered else 1.0
