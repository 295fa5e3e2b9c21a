"""Metrics as Prometheus reads them (text format 0.0.4), made quickly: a router does nothing else meanwhile.

The same bytes as `prometheus_client.generate_latest`, for the kinds of metrics that there are here, in half of its
time: names here need no escaping, and timestamps and exemplars are not told.
"""

from collections.abc import Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_CREATED = "_created"
_TENANT = "tenant"


def render_exposition(registry: Collector) -> bytes:
    """Everything that the registry collects: counters, gauges and histograms."""
    lines: list[str] = []
    for metric in registry.collect():
        _write_family(metric, lines)
    return "".join(lines).encode()


def only_tenant(text: bytes, label: str) -> bytes:
    """Of an exposition the series that carry `tenant="label"`, below the heads of their families.

    An unescaped quote ends a label's value, so what is looked for cannot stand inside of one.
    """
    marks = [f'{before}{_TENANT}="{_escaped(label)}"' for before in ("{", ",")]
    kept: list[str] = []
    head: list[str] = []
    for line in text.decode().split("\n"):
        if line.startswith("#"):
            # HELP begins a family's head, and TYPE follows.
            head = [line] if line.startswith("# HELP ") else [*head, line]
        elif any(mark in line for mark in marks):
            kept += [*head, line]
            head = []
    return "".join([f"{line}\n" for line in kept]).encode()


def _write_family(metric: Metric, lines: list[str]) -> None:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    lines.append(f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n")
    created_name = metric.name + _CREATED
    created: list[str] = []
    for sample in metric.samples:
        number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        line = f"{sample.name}{_labels(sample.labels)} {number}\n"
        (created if sample.name == created_name else lines).append(line)
    if created:
        lines.append(f"# HELP {created_name} {text}\n# TYPE {created_name} gauge\n")
        lines += created


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)]) + "}"


def _escaped(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
