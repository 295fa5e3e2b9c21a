"""Requests by LoRA adapter: what vLLM's dashboards and gateways read of it, and gauges by adapter. Pure.

The names are those of adapters that an operator serves, never a client's text.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.adapter_use import AdapterUse
from router.metrics.instruments import LabelledHistogram

MAX_NAMES = 256
"""Adapters that have series of their own; requests for further ones count together, as `other`."""
MAX_JOINED_CHARS = 8192
"""Length of a label that lists adapters."""
OTHER = "other"
REQUESTS_INFO = "vllm:lora_requests_info"


class AdapterLabels:
    """The labels of adapters; an adapter keeps its own while it is remembered."""

    def __init__(self, series: Sequence[LabelledHistogram] = ()) -> None:
        """`series`: those with an adapter's label as their only one; they end with it."""
        self._series = series
        self._known: set[str] = set()
        self.is_remembered: Callable[[str], bool] = lambda _name: True
        """Returns whether a name is served, or was until lately."""

    def label_for(self, name: str) -> str:
        """Return an adapter's label: its name, unless too many others came before."""
        if name not in self._known:
            if len(self._known) >= MAX_NAMES:
                self.free()
            if len(self._known) >= MAX_NAMES:
                return OTHER
            self._known.add(name)
        return name

    def free(self) -> None:
        """Forget the labels of adapters that are no longer remembered, and end their series."""
        for name in [name for name in self._known if not self.is_remembered(name)]:
            self._known.remove(name)
            for series in self._series:
                series.remove(name)


class AdapterMetrics(Collector):
    def __init__(
        self,
        use: AdapterUse,
        labels: AdapterLabels,
        served: Sized,
        *,
        is_remembered: Callable[[str], bool] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`served`: the adapters that may be named. `is_remembered`: see `AdapterLabels`; None: all are."""
        if is_remembered is not None:
            labels.is_remembered = is_remembered
        self._use = use
        self._labels = labels
        self._served = served
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[Metric]:
        """Return nothing where no adapter can be named."""
        self._labels.free()
        num_served, use = len(self._served), self._use
        if not (num_served or use.running or use.waiting):
            return
        # Every adapter may be in use at once: workers load them with requests, and a batch may have all of them.
        text = "Adapters of running and waiting requests, in labels; the value is the time of the scrape"
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = GaugeMetricFamily(REQUESTS_INFO, text, labels=names)
        info.add_metric((str(num_served), joined_names(use.waiting), joined_names(use.running)), self._wall_clock())
        yield info
        text = "Requests by LoRA adapter that wait for their turn or run"
        requests = GaugeMetricFamily("tandem_adapter_requests", text, labels=("adapter", "state"))
        for state, counts in (("waiting", use.waiting), ("running", use.running)):
            by_label: Counter[str] = Counter()
            for name, count in counts.items():
                by_label[self._labels.label_for(name)] += count
            for label, count in by_label.items():
                requests.add_metric((label, state), count)
        yield requests


def joined_names(names: Iterable[str]) -> str:
    """Return the first of these names, as many as a label may have."""
    joined = ",".join(sorted(names)[:MAX_NAMES])
    return joined if len(joined) <= MAX_JOINED_CHARS else joined[: MAX_JOINED_CHARS + 1].rpartition(",")[0]


def merged_requests_info(labels: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the labels of `vllm:lora_requests_info` of several router processes: all their adapters."""
    most, names = 0, {"running_lora_adapters": set[str](), "waiting_lora_adapters": set[str]()}
    for one in labels:
        most = max(most, int(one["max_lora"]))
        for label, found in names.items():
            found.update(name for name in one[label].split(",") if name)
    return {"max_lora": str(most)} | {label: joined_names(found) for label, found in names.items()}
