"""Requests by LoRA adapter: what vLLM's dashboards and gateways read of it, and gauges by adapter. Pure.

The names are those of adapters that an operator serves, never a client's text.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sized

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.adapter_use import AdapterUse

MAX_NAMES = 256
"""Adapters that have series of their own; requests for further ones count together, as `other`."""
OTHER = "other"


class AdapterLabels:
    """The labels of adapters; an adapter keeps its own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label_for(self, name: str) -> str:
        """Return an adapter's label: its name, unless too many others came before."""
        if name not in self._known:
            if len(self._known) >= MAX_NAMES:
                return OTHER
            self._known.add(name)
        return name


class AdapterMetrics(Collector):
    def __init__(
        self, use: AdapterUse, labels: AdapterLabels, served: Sized, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`served`: the adapters that may be named."""
        self._use = use
        self._labels = labels
        self._served = served
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[Metric]:
        """Return nothing where no adapter can be named."""
        num_served, use = len(self._served), self._use
        if not (num_served or use.running or use.waiting):
            return
        # Every adapter may be in use at once: workers load them with requests, and a batch may have all of them.
        text = "Adapters of running and waiting requests, in labels; the value is the time of the scrape"
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=names)
        info.add_metric((str(num_served), _joined(use.waiting), _joined(use.running)), self._wall_clock())
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


def _joined(counts: Counter[str]) -> str:
    return ",".join(sorted(counts)[:MAX_NAMES])
