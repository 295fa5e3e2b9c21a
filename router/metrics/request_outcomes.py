"""The outcome of a request: whether it counts as goodput, and OpenTelemetry's GenAI histograms. Pure.

The histograms, under the names that OpenTelemetry's exporters give them in Prometheus, are for dashboards that cover
servers of several vendors; `vllm:` and `tandem_` metrics have more detail. Observed once per request.
"""

from enum import Enum

from prometheus_client.registry import CollectorRegistry

from router.metrics.instruments import LabelledHistogram
from tandem.config.telemetry import ObjectivesConfig
from tandem.errors import Code

_PROVIDER = "tandem"
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")


class GenAiMetrics:
    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._duration = LabelledHistogram(
            "gen_ai_server_request_duration_seconds",
            "Duration of requests from arrival to end; error_type is empty for successful ones",
            _DURATION,
            (*_LABELS, "error_type"),
        )
        self._first = LabelledHistogram(
            "gen_ai_server_time_to_first_token_seconds", "Time from arrival to the first token, of successful requests",
            _FIRST, _LABELS,
        )  # fmt: skip
        self._per_token = LabelledHistogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per output token after the first, of successful requests",
            _PER_TOKEN,
            _LABELS,
        )
        for collector in (self._duration, self._first, self._per_token):
            registry.register(collector)

    def ended(
        self, operation: str, seconds: float, code: Code | None, *, ttft_s: float | None, per_token_s: float | None
    ) -> None:
        """Observe one request; None where there was no first token, or no second one."""
        labels = (operation, _PROVIDER, self._model, self._model)
        self._duration.observe(seconds, *labels, "" if code is None else code.value)
        if code is not None:
            return
        if ttft_s is not None:
            self._first.observe(ttft_s, *labels)
        if per_token_s is not None:
            self._per_token.observe(per_token_s, *labels)


_OURS = frozenset({Code.INTERNAL, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})


class RequestVerdict(Enum):
    """The outcome of a request, the worst that applies."""

    GOOD = "good"
    LATE_FIRST = "late_first"
    LATE_TOKENS = "late_tokens"
    REFUSED = "refused"
    FAILED = "failed"


def judge_request(
    objectives: ObjectivesConfig, code: Code | None, *, ttft_s: float | None, per_token_s: float | None
) -> RequestVerdict | None:
    """Return the verdict; None where the client cancelled the request or sent an invalid one, which is not our fault.

    `code`: how it failed. `ttft_s`, `per_token_s`: None where there was no first token, or no second one.
    """
    if code in _OURS:
        return RequestVerdict.FAILED
    if code is Code.RESOURCE_EXHAUSTED:
        return RequestVerdict.REFUSED
    if code is not None:
        return None
    if ttft_s is not None and ttft_s > objectives.ttft_s:
        return RequestVerdict.LATE_FIRST
    if per_token_s is not None and per_token_s > objectives.per_token_s:
        return RequestVerdict.LATE_TOKENS
    return RequestVerdict.GOOD
