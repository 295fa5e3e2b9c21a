"""The figures of several router processes as those of one router. Pure.

Processes that share a door share its answers: what each counted is added up. What workers tell of themselves, and what
is known of them, every process knows alike: there the greatest stands, because it is the latest.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.exposition import exposition

_OF_WORKERS = ("tandem_worker", "vllm:num_preemptions", "vllm:iteration_tokens_total")
_ADDED_GAUGES = frozenset(
    {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "tandem_queue_requests",
        "tandem_queue_tokens",
        "tandem_refused_choices",
    }
)
_CREATED = "_created"


def merge(texts: Sequence[bytes]) -> bytes:
    """Expositions (Prometheus text format 0.0.4) of one moment into one. Raises ValueError for what is none."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, family)
            _add(values.setdefault(family.name, {}), family)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told([_family(families[name], found) for name, found in values.items()]))
    return exposition(registry)


def _add(found: dict[tuple[str, tuple[tuple[str, str], ...]], float], family: Metric) -> None:
    adds = _adds(family)
    for sample in family.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        if key not in found:
            found[key] = sample.value
        elif sample.name.endswith(_CREATED):
            found[key] = min(found[key], sample.value)
        else:
            found[key] = found[key] + sample.value if adds else max(found[key], sample.value)


def _adds(family: Metric) -> bool:
    if family.name.startswith(_OF_WORKERS):
        return False
    return family.type != "gauge" or family.name in _ADDED_GAUGES


def _family(like: Metric, found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> Metric:
    made = Metric(like.name, like.documentation, like.type)
    made.samples = [Sample(name, dict(labels), value) for (name, labels), value in found.items()]
    return made


class _Told(Collector):
    """A registry's way to what is known already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        yield from self._families
