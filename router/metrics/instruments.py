"""Instruments for a single thread, kept as plain numbers and rendered for Prometheus at each scrape.

prometheus_client's own instruments take a lock, and several calls, for each observation: too much for those made for
every token. Nothing here may be called from another thread.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class SingleValue(Collector):
    """A counter or gauge without labels."""

    def __init__(
        self,
        name: str,
        text: str,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        labels: Mapping[str, str],
    ) -> None:
        self.value = 0.0
        self._name = name
        self._text = text
        self._family = family
        self._labels = labels

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self) -> None:
        """Subtract one; for gauges."""
        self.value -= 1.0

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self.value)
        yield family


class LabelledCounter(Collector):
    """A counter with labels that have few values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, known: Iterable[tuple[str, ...]] = ()) -> None:
        """`known`: label values exported from the start, so that a rate sees their first increment."""
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self.values = defaultdict[tuple[str, ...], float](float, dict.fromkeys(known, 0.0))
        """The counts by the labels' values in order; what every request counts is added here directly."""

    def inc(self, *values: str, amount: float = 1.0) -> None:
        """Add `amount`, under the labels' values in order."""
        self.values[values] += amount

    def set_total(self, *values: str, total: float) -> None:
        """Set a count that is kept elsewhere, under these labels' values."""
        self.values[values] = total

    def sum(self, *, without: str | None = None) -> float:
        """Return the sum over all labels; `without`: leaves out values whose first label is this one."""
        return sum(value for labels, value in self.values.items() if labels[0] != without)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, value in self.values.items():
            family.add_metric(values, value)
        yield family


class LocalHistogram(Collector):
    """A histogram without labels. Observations are collected, and sorted into buckets many at a time.

    For each of them that takes a fraction of the time: the code and the buckets are in the processor's cache then.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Mapping[str, str], *, finer: Sequence[float] = ()
    ) -> None:
        """`bounds`: ascending upper ends of buckets, without infinity. `finer`: further bounds that are not
        exported."""
        self._name = name
        self._text = text
        self.bounds = tuple(sorted({*bounds, *finer}))
        """Upper ends of all buckets that are counted."""
        self._shown = dict(zip(map(self.bounds.index, bounds), map(floatToGoString, bounds), strict=True))
        self._labels = labels
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self.pending: list[float] = []
        """Observations that are not in the buckets yet. Whoever makes many has to call `fold` now and then."""
        self.observe: Callable[[float], None] = self.pending.append
        """Records one observation."""

    def observe_many(self, value: float, count: int) -> None:
        """Record `count` observations of one value."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def fold(self) -> None:
        """Sort the pending observations into their buckets."""
        counts, bounds, total = self._counts, self.bounds, self._sum
        for value in self.pending:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum = total
        self.pending.clear()

    @property
    def counts(self) -> Sequence[int]:
        """Observations so far by bucket, those above all bounds last."""
        self.fold()
        return tuple(self._counts)

    def collect(self) -> Iterable[Metric]:
        self.fold()
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), cumulative(self._counts, self._shown), self._sum)
        yield family


class LabelledHistogram(Collector):
    """A histogram with labels that have few values."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        """`bounds`: ascending upper ends of buckets, without infinity."""
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._shown = dict(enumerate(map(floatToGoString, bounds)))
        self._labels = tuple(labels)
        self._counts = defaultdict[tuple[str, ...], list[int]](lambda: [0] * (len(self._bounds) + 1))
        self._sums = defaultdict[tuple[str, ...], float](float)

    def observe(self, value: float, *labels: str) -> None:
        """Record one observation, under the labels' values in order."""
        self._counts[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def observe_each(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Record several observations, each under the labels' values in order."""
        for labels, value in values.items():
            self._counts[labels][bisect_left(self._bounds, value)] += 1
            self._sums[labels] += value

    def remove(self, *labels: str) -> None:
        """End the series with these labels; no-op where there is none."""
        self._counts.pop(labels, None)
        self._sums.pop(labels, None)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            family.add_metric(labels, cumulative(counts, self._shown), self._sums[labels])
        yield family


def cumulative(counts: Sequence[int], shown: Mapping[int, str]) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets from counts by bucket; `shown`: the upper ends to export."""
    buckets: list[tuple[str, float]] = []
    reached = 0
    for index, count in enumerate(counts):
        reached += count
        if (bound := shown.get(index)) is not None:
            buckets.append((bound, reached))
    return [*buckets, ("+Inf", reached)]
