"""Names of the series that a router emits, from its own registry; and those that a PromQL expression asks for."""

import re
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from router.metrics.admission import AdmissionMetrics
from router.metrics.router_metrics import RouterMetrics
from router.types.worker_view import EngineStepTotals, EngineWorkReport
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.overload_world import snapshot

_STEPS = EngineStepTotals(steps=1, seconds=0.1, tokens=1, requests=1)
_WORK = EngineWorkReport(
    prefill=_STEPS, decode=_STEPS, preemptions=0, resident_bytes=1, weights_bytes=1, kv_bytes=1, flops_per_token=1
)
_SERIES = re.compile(r"\b(?:tandem_|vllm:)[a-z0-9_:]+")


@cache
def emitted() -> frozenset[str]:
    """With one worker in sight."""
    metrics = RouterMetrics("m")
    metrics.registry.register(AdmissionMetrics(AdmissionBench().admission, metrics.tenants))
    metrics.worker_loads([snapshot(work=_WORK)])
    families = text_string_to_metric_families(metrics.render().decode())
    return frozenset(sample.name for family in families for sample in family.samples)


def named_in(expression: str) -> set[str]:
    return set(_SERIES.findall(expression))
