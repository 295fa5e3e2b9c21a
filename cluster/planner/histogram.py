"""A Prometheus histogram as values: what came between two looks, and what its buckets say of lengths' moments. Pure."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan

_ROUNDING = 1e-9
"""Parts of a sum may be added up in another order each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations by bucket, and their sum."""

    bounds: tuple[float, ...] = ()
    """Upper ends, ascending; the last is infinity."""
    counts: tuple[float, ...] = ()
    """Of each bucket alone."""
    total: float = 0.0

    @classmethod
    def from_cumulative(cls, cumulative: dict[float, float], total: float) -> "Histogram":
        """From the text format: by upper end, how many are at most that. ValueError for what no histogram says."""
        bounds = tuple(sorted(cumulative))
        reached = [0.0, *(cumulative[bound] for bound in bounds)]
        counts = tuple(after - before for before, after in pairwise(reached))
        if any(isnan(bound) for bound in bounds) or any(count < 0.0 for count in counts):
            raise ValueError("a histogram has fewer observations up to a value than up to a smaller one, or no values")
        return cls(bounds=bounds, counts=counts, total=total)

    @property
    def num(self) -> float:
        return sum(self.counts)

    def plus(self, other: "Histogram", *, kept: float = 1.0) -> "Histogram":
        """A share of this, and another's; one that is empty has no buckets yet.

        Routers of two versions may have other bounds: then those stay that both have, infinity at least.
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
        """The observations since an earlier reading."""
        return self if not earlier.bounds else self.plus(earlier.scaled(-1.0))

    def scaled(self, share: float) -> "Histogram":
        """So much of each bucket."""
        counts = tuple(share * count for count in self.counts)
        return Histogram(bounds=self.bounds, counts=counts, total=share * self.total)

    def _at(self, bounds: tuple[float, ...]) -> "Histogram":
        """With those of its bounds alone that are among these."""
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
        """Whether it counts anew: no bucket of one that goes on ever falls, nor its sum, but for the last digits."""
        if earlier.bounds != self.bounds:
            return bool(earlier.bounds)
        if self.total < earlier.total * (1.0 - _ROUNDING):
            return True
        return any(now < before for now, before in zip(self.counts, earlier.counts, strict=True))

    def above(self, value: float) -> float:
        """Observations above it; those of its own bucket are taken to lie evenly."""
        above, low = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if low >= value:
                above += count
            elif bound > value:
                above += count if bound == inf else count * (bound - value) / (bound - low)
            low = bound
        return above

    def values(self) -> list[tuple[float, float]]:
        """A value of each bucket that is not empty, and how many have it: middles, moved so that the sum is right."""
        middles: list[tuple[float, float]] = []
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count > 0.0:
                middles.append((1.5 * low if bound == inf else (low + bound) / 2, count))
            low = bound
        told = sum(middle * count for middle, count in middles)
        factor = self.total / told if told > 0.0 else 1.0
        return [(factor * middle, count) for middle, count in middles]

    def moment(self, power: int) -> float:
        """The mean of the values' powers; 0 where there are none."""
        num = self.num
        return sum(count * value**power for value, count in self.values()) / num if num > 0.0 else 0.0
