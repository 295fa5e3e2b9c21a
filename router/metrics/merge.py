"""Merges the metrics of several router processes into those of one router. Pure.

Processes that share a port share its requests: their counts are added up. What workers report is known to every process
alike: the greatest value wins, because it is the latest. Of gauges that every process must satisfy by itself, the least
wins.

All of them write with prometheus_client, with labels in the same order, so that the text before the value identifies a
series: labels need not be parsed, except of the one metric that lists names in them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString

from router.metrics.adapters import REQUESTS_INFO, merged_requests_info

_OF_WORKERS = (
    "tandem_worker",
    "vllm:num_preemptions",
    "vllm:iteration_tokens_total",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)
_ADDED_GAUGES = frozenset(
    {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "tandem_adapter_requests",
        "tandem_queue_requests",
        "tandem_queue_tokens",
        "tandem_refused_choices",
        "tandem_link_handoffs",
        "tandem_tokenizer_cache_bytes",
        "tandem_native_streams",
        "tandem_native_streams_limit",
    }
)
_LEAST_GAUGES = frozenset({"tandem_redis_up", "tandem_member_certificate_not_after_seconds"})
"""Gauges of each process of which the worst one matters."""
_CREATED = "_created"
_HELP, _TYPE = "# HELP ", "# TYPE "
_KINDS = frozenset({"counter", "gauge", "histogram"})
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class _Family:
    name: str
    text: str = ""
    kind: str = ""
    values: dict[str, float] = field(default_factory=dict)
    """Values by the text before them: a name and its labels."""

    def add(self, series: str, value: float) -> None:
        """Add the value of one more process."""
        known = self.values.get(series)
        if known is None:
            self.values[series] = value
        elif self.name.endswith(_CREATED) or self.name in _LEAST_GAUGES:
            self.values[series] = min(known, value)
        else:
            self.values[series] = known + value if self._adds() else max(known, value)

    def _adds(self) -> bool:
        if self.name.startswith(_OF_WORKERS):
            return False
        return self.kind != "gauge" or self.name in _ADDED_GAUGES

    def lines(self) -> list[str]:
        """Return the merged lines in the original format."""
        head = f"{_HELP}{self.name} {self.text}\n" if self.text else ""
        head += f"{_TYPE}{self.name} {self.kind}\n"
        return [head] + [f"{series} {floatToGoString(value)}\n" for series, value in self.values.items()]  # type: ignore[no-untyped-call]


def merge(texts: Sequence[bytes]) -> bytes:
    """Merge expositions (Prometheus text format 0.0.4) of one moment. Raises ValueError for invalid ones."""
    families: dict[str, _Family] = {}
    for text in texts:
        _read(text.decode(), families)
    if (info := families.get(REQUESTS_INFO)) is not None and info.values:
        info.values = _merged_info(info.values)
    return "".join([line for family in families.values() for line in family.lines()]).encode()


def _merged_info(values: Mapping[str, float]) -> dict[str, float]:
    """Make one series of those with different names in their labels; names of adapters need no quoting."""
    merged = merged_requests_info(dict(_LABEL.findall(series)) for series in values)
    labels = ",".join(f'{label}="{value}"' for label, value in merged.items())
    return {f"{REQUESTS_INFO}{{{labels}}}": max(values.values())}


def _read(text: str, families: dict[str, _Family]) -> None:
    family: _Family | None = None
    for line in text.split("\n"):
        if line.startswith(_HELP):
            name, _, words = line.removeprefix(_HELP).partition(" ")
            families.setdefault(name, _Family(name)).text = words
        elif line.startswith(_TYPE):
            name, _, kind = line.removeprefix(_TYPE).partition(" ")
            family = families.setdefault(name, _Family(name))
            if kind not in _KINDS or family.kind not in ("", kind):
                raise ValueError(f"{name}: unknown type {kind[:20]}")
            family.kind = kind
        elif line:
            series, _, value = line.rpartition(" ")
            if family is None or not series.startswith(family.name):
                raise ValueError(f"{line[:100]}: no type declared")
            family.add(series, float(value))
