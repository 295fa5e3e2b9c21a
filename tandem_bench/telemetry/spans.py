"""Cost of a request's spans for the router on one thread, without servers: processor time of the tracer's calls.

The turns on a cluster show the same within a machine's noise; this is accurate to a microsecond.
"""

import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from tandem.telemetry.otel_pipeline import make_resource
from tandem.telemetry.otel_tracer import OtelTracer
from tandem.telemetry.tracing import Attribute, Tracer
from tandem_bench.report import Row, figure

_REPETITIONS = 9
_UNSAMPLED_CALLS = 20_000
_SAMPLED_CALLS = 2_000
_BATCHES = 20
_MAX_UNSAMPLED_US = 10.0
_REQUEST: dict[str, Attribute] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "tandem",
    "gen_ai.request.model": "model",
    "gen_ai.request.max_tokens": 8,
    "gen_ai.request.choice.count": 1,
    "gen_ai.request.temperature": 0.0,
    "gen_ai.request.top_p": 1.0,
    "gen_ai.response.id": "0123456789abcdef",
    "gen_ai.response.model": "model",
    "tandem.request.id": "0123456789abcdef",
}
_PLACE: dict[str, Attribute] = {
    "tandem.choice": 0,
    "tandem.attempt": 1,
    "tandem.placement.reason": "least_cost",
    "tandem.placement.uncached_tokens": 100,
    "tandem.decode_worker": "decode-0",
    "tandem.prefill_worker": "prefill-0",
}
_USAGE: dict[str, Attribute] = {
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.output_tokens": 8,
    "gen_ai.usage.cache_read.input_tokens": 0,
    "gen_ai.response.finish_reasons": ("length",),
}


class _Keep(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def measure_spans() -> list[Row]:
    """Measure the minimum of several repetitions each, in microseconds of this thread."""
    tracer, _ = _tracer(0.0)
    unsampled_us = _least_us(lambda: _one_request(tracer), _UNSAMPLED_CALLS)
    sampling, kept = _tracer(1.0)
    sampled_us = _least_us(lambda: _one_request(sampling), _SAMPLED_CALLS, after=kept.spans.clear)
    for _ in range(_BATCHES):
        _one_request(sampling)
    encoding_us = _least_us(lambda: _encode(kept.spans), 1) / _BATCHES
    return [
        figure("spans: request that is not sampled", unsampled_us, "CPU us/request", at_most=_MAX_UNSAMPLED_US),
        figure("spans: sampled request, its spans", sampled_us, "CPU us/request"),
        figure("spans: sampled request, encoding them", encoding_us, "CPU us/request"),
    ]


def _tracer(ratio: float) -> tuple[OtelTracer, _Keep]:
    kept = _Keep()
    provider = TracerProvider(resource=make_resource("tandem-router", "bench"), shutdown_on_exit=False)
    provider.add_span_processor(kept)
    return OtelTracer(provider, ratio), kept


def _one_request(tracer: Tracer) -> None:
    """Make the calls that a router makes for one request with one choice."""
    now_s = time.monotonic()
    span = tracer.request("chat model", None, now_s)
    if span is None:
        return
    span.set_attributes(_REQUEST)
    span.interval("tandem.preprocess", now_s, now_s)
    span.interval("tandem.place", now_s, now_s, **_PLACE)
    span.context.to_text()
    span.event("first_token", now_s)
    span.set_attributes(_USAGE)
    span.end(now_s)


def _encode(spans: Sequence[ReadableSpan]) -> None:
    encode_spans(spans).SerializeToString()


def _least_us(call: Callable[[], None], count: int, *, after: Callable[[], None] | None = None) -> float:
    times = []
    for _ in range(_REPETITIONS):
        begun_s = time.thread_time()
        for _ in range(count):
            call()
        times.append((time.thread_time() - begun_s) / count)
        if after is not None:
            after()
    return 1e6 * min(times)
