"""The tracer on the OpenTelemetry SDK: implements `tandem.telemetry.tracing` with its spans, samplers and propagators.

Only `tandem/telemetry/otel_pipeline.py` imports this module, when tracing is on.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import SpanContext, TraceState, format_trace_id
from opentelemetry.util.types import Attributes

from tandem.telemetry.tracing import MAX_EVENTS, Attribute, Span, TraceContext, Trusted

_NS = 1_000_000_000
_NO_PARENT = Context()
_W3C = TraceContextTextMapPropagator()
_EPOCH_READINGS = 3
"""Number of readings of both clocks; the closest pair counts, since the thread may be interrupted between the two."""
_EPOCH_VALID_S = 1.0


class AdjustableSampler(Sampler):
    """Samples by `telemetry.sample_ratio`, which may change; a parent's decision is kept.

    Without a ratio the SDK's own sampler decides: that of OTEL_TRACES_SAMPLER, else one that takes every trace.
    """

    def __init__(self, environment: Sampler, ratio: float | None) -> None:
        self._environment = environment
        self.set_ratio(ratio)

    def set_ratio(self, ratio: float | None) -> None:
        """Set the ratio for new traces, from any thread."""
        self._sampler = self._environment if ratio is None else ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        return self._sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return self._sampler.get_description()


class EpochClock:
    """Unix time at which the monotonic clock was 0, in nanoseconds; measured every second, since the clocks drift."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._epoch_ns = 0
        self._read_s: float | None = None

    def __call__(self) -> int:
        now_s = self._monotonic()
        if self._read_s is None or now_s - self._read_s > _EPOCH_VALID_S:
            self._epoch_ns, self._read_s = _read_epoch_ns(), now_s
        return self._epoch_ns


def _read_epoch_ns() -> int:
    pauses = []
    for _ in range(_EPOCH_READINGS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        pauses.append((time.monotonic_ns() - before, wall - before))
    return min(pauses)[1]


class OtelTracer:
    """A `Tracer` that records sampled requests.

    A trusted client's `traceparent` decides, otherwise the sampler. An untrusted client can neither force nor prevent
    tracing, nor choose the trace: it could fill the queue of spans, or write into another client's trace. Its trace id
    becomes an attribute.
    """

    def __init__(
        self,
        provider: TracerProvider,
        sample_ratio: float | None = None,
        *,
        trusted: Trusted = "all",
        clock: Callable[[], float] = time.monotonic,
        epoch_ns: Callable[[], int] | None = None,
    ) -> None:
        """`provider`: one without a tracer yet; its sampler decides when `sample_ratio` is None."""
        self._sampler = AdjustableSampler(provider.sampler, sample_ratio)
        provider.sampler = self._sampler
        self.sdk = provider.get_tracer("tandem")
        self.clock = clock
        self._epoch_ns = EpochClock() if epoch_ns is None else epoch_ns
        self._trusted = trusted

    def set_sample_ratio(self, ratio: float | None) -> None:
        self._sampler.set_ratio(ratio)

    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        follows = client is not None and (self._trusted == "all" or (self._trusted == "operators" and by_operator))
        parent = _extract(client) if follows and client is not None else _NO_PARENT
        span = self._begin(name, parent, start_s, SpanKind.SERVER)
        if span is not None and client is not None and not follows:
            named = _span_context(_extract(client))
            if named.is_valid:
                span.set_attributes({"tandem.client_trace_id": format_trace_id(named.trace_id)})
        return span

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        if parent is None:
            return None
        context = _extract(parent)
        if not _span_context(context).is_valid:
            return None
        return self._begin(name, context, self.clock() if start_s is None else start_s, SpanKind.INTERNAL)

    def _begin(self, name: str, parent: Context, start_s: float, kind: SpanKind) -> Span | None:
        epoch_ns = self._epoch_ns()
        span = self.sdk.start_span(name, parent, kind=kind, start_time=epoch_ns + int(start_s * _NS))
        return OtelSpan(self.sdk, span, start_s, self.clock, epoch_ns) if span.is_recording() else None


class OtelSpan:
    """A `Span` over the SDK's. Its children in this process use the same reading of the clocks."""

    __slots__ = ("_clock", "_epoch_ns", "_error", "_is_ended", "_num_events", "_sdk", "_span", "_start_s")

    def __init__(
        self, sdk: SdkTracer, span: SdkSpan, start_s: float, clock: Callable[[], float], epoch_ns: int
    ) -> None:
        self._sdk = sdk
        self._span = span
        self._start_s = start_s
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._num_events = 0
        self._error: str | None = None
        self._is_ended = False

    @property
    def context(self) -> TraceContext:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._span, _NO_PARENT))
        return TraceContext(traceparent=carrier["traceparent"], tracestate=carrier.get("tracestate", ""))

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def now(self) -> float:
        return self._clock()

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None:
        if not self._is_ended:
            self._span.set_attributes(attributes)

    def child(self, name: str, start_s: float) -> "OtelSpan":
        parent = set_span_in_context(self._span, _NO_PARENT)
        span = self._sdk.start_span(name, parent, start_time=self._unix_ns(start_s))
        return OtelSpan(self._sdk, span, start_s, self._clock, self._epoch_ns)

    def interval(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        span = self.child(name, start_s)
        if attributes:
            span.set_attributes(attributes)
        span.end(end_s)

    def event(self, name: str, at_s: float, **attributes: Attribute) -> None:
        if self._is_ended:
            return
        self._num_events += 1
        if self._num_events <= MAX_EVENTS:
            self._span.add_event(name, attributes, self._unix_ns(at_s))

    def fail(self, error: str) -> None:
        self._error = self._error or error

    def end(self, at_s: float | None = None) -> None:
        if self._is_ended:
            return
        if self._num_events > MAX_EVENTS:
            self._span.set_attribute("tandem.dropped_events", self._num_events - MAX_EVENTS)
        if self._error is not None:
            self._span.set_status(Status(StatusCode.ERROR, self._error))
        self._is_ended = True
        self._span.end(self._unix_ns(max(self._start_s, self._clock() if at_s is None else at_s)))

    def _unix_ns(self, at_s: float) -> int:
        return self._epoch_ns + int(at_s * _NS)


def _extract(context: TraceContext) -> Context:
    """Parse the W3C headers into a parent; no parent where they are malformed."""
    return _W3C.extract({"traceparent": context.traceparent, "tracestate": context.tracestate}, _NO_PARENT)


def _span_context(context: Context) -> SpanContext:
    return get_current_span(context).get_span_context()
