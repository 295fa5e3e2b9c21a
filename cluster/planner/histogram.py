"""A Prometheus histogram as values: the change between two readings, and the moments its buckets imply. Pure."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan

_ROUNDING = 1e-9
"""Relative tolerance: parts of a sum may be added in another order each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations by bucket, and their sum."""

    bounds: tuple[float, ...] = ()
    """Upper bounds, ascending; the last is infinity."""
    counts: tuple[float, ...] = ()
    """Observations in each bucket alone."""
    total: float = 0.0

    @classmethod
    def from_cumulative(cls, cumulative: dict[float, float], total: float) -> "Histogram":
        """Build from the text format: observations at most each upper bound. ValueError for an invalid histogram."""
        bounds = tuple(sorted(cumulative))
        reached = [0.0, *(cumulative[bound] for bound in bounds)]
        counts = tuple(after - before for before, after in pairwise(reached))
        if any(isnan(bound) for bound in bounds) or any(count < 0.0 for count in counts):
            raise ValueError("histogram buckets must be cumulative and not empty")
        return cls(bounds=bounds, counts=counts, total=total)

    @property
    def num(self) -> float:
        return sum(self.counts)

    def plus(self, other: "Histogram", *, kept: float = 1.0) -> "Histogram":
        """Return a share of this plus another; an empty one has no buckets yet.

        Routers of two versions may have different bounds: then the common ones stay, at least infinity.
        """
        if not self.bounds:
            return other
        if not other.bounds:
            return self.scaled(kept)
        if self.bounds != other.bounds:
            return self._at(other.bounds).plus(other._at(self.bounds), kept=kept)
        counts = tuple(kept * mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Histogram(bounds=self.bounds, counts=counts, total=kept * self.total + other.total)

    def minus(self, earlier: "Histogram") -> "Histogram":
        """Return the observations since an earlier reading."""
        return self if not earlier.bounds else self.plus(earlier.scaled(-1.0))

    def scaled(self, share: float) -> "Histogram":
        """Return this with every bucket multiplied by a share."""
        counts = tuple(share * count for count in self.counts)
        return Histogram(bounds=self.bounds, counts=counts, total=share * self.total)

    def _at(self, bounds: tuple[float, ...]) -> "Histogram":
        """Return this with only those bounds that are among the given ones."""
        kept: list[float] = []
        counts: list[float] = []
        below = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            below += count
            if bound in bounds:
                kept.append(bound)
                counts.append(below)
                below = 0.0
        return Histogram(bounds=tuple(kept), counts=tuple(counts), total=self.total)

    def fell_below(self, earlier: "Histogram") -> bool:
        """Return whether the counts have restarted: otherwise no bucket ever falls, nor the sum beyond rounding."""
        if earlier.bounds != self.bounds:
            return bool(earlier.bounds)
        if self.total < earlier.total * (1.0 - _ROUNDING):
            return True
        return any(now < before for now, before in zip(self.counts, earlier.counts, strict=True))

    def above(self, value: float) -> float:
        """Estimate the observations above a value, assuming an even distribution within its bucket."""
        above, low = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if low >= value:
                above += count
            elif bound > value:
                above += count if bound == inf else count * (bound - value) / (bound - low)
            low = bound
        return above

    def values(self) -> list[tuple[float, float]]:
        """Return a representative value and the count of each non-empty bucket, adjusted to match the sum."""
        middles: list[tuple[float, float]] = []
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count > 0.0:
                middles.append((1.5 * low if bound == inf else (low + bound) / 2, count))
            low = bound
        estimate = sum(middle * count for middle, count in middles)
        factor = self.total / estimate if estimate > 0.0 else 1.0
        return [(factor * middle, count) for middle, count in middles]

    def moment(self, power: int) -> float:
        """Return the mean of a power of the values; 0 without values."""
        num = self.num
        return sum(count * value**power for value, count in self.values()) / num if num > 0.0 else 0.0
