"""Quantiles of latencies that were only counted in buckets. Pure.

The bounds grow by a fourth root of two, so that a quantile is off by at most a tenth of itself: the coarse buckets that
dashboards expect of a histogram do not resolve latencies below their first bound.
"""

from collections.abc import Mapping, Sequence

_FIRST_S = 1e-4
_PER_DOUBLING = 4
_NUM_BOUNDS = 100
FINE_BOUNDS_S = tuple(_FIRST_S * 2 ** (index / _PER_DOUBLING) for index in range(_NUM_BOUNDS))
"""Bounds from a tenth of a millisecond to most of an hour."""


def quantile(counts: Mapping[int, int], bounds: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the observations do not exceed; None when there are none.

    `counts`: observations by the index of their bucket; the last index, beyond all bounds, has no upper end. Within a
    bucket observations are assumed to be evenly distributed.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    wanted, reached = share * total, 0
    for index in sorted(counts):
        count = counts[index]
        if count > 0 and reached + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low
            return low + (high - low) * max(0.0, wanted - reached) / count
        reached += count
    return bounds[-1]
