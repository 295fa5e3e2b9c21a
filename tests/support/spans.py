"""A tracer whose spans a test can look at: the SDK's, with a processor that keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

from tandem.telemetry.otel_tracer import OtelTracer
from tandem.telemetry.tracing import TraceContext, Trusted

CLIENT_TRACE_ID, CLIENT_SPAN_ID = 0xABC, 0xDEF


def context_of(trace_id: int, span_id: int, *, sampled: bool = True, state: str = "") -> TraceContext:
    return TraceContext(traceparent=f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}", tracestate=state)


CLIENT = context_of(CLIENT_TRACE_ID, CLIENT_SPAN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEvent:
    name: str
    at_s: float
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpan:
    """All of a span that has ended. Times are of the tracer's clock."""

    name: str
    trace_id: int
    span_id: int
    context: TraceContext
    parent_id: int | None
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    events: list[KeptEvent]
    error: str | None
    is_request: bool


class Kept(SpanProcessor):
    """A span processor that keeps every span in memory."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        self.spans.append(
            KeptSpan(
                name=span.name,
                trace_id=context.trace_id,
                span_id=context.span_id,
                context=TraceContext(
                    traceparent=f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
                    tracestate=context.trace_state.to_header(),
                ),
                parent_id=None if span.parent is None else span.parent.span_id,
                start_s=span.start_time / 1e9,
                end_s=span.end_time / 1e9,
                attributes=dict(span.attributes),
                events=[
                    KeptEvent(name=event.name, at_s=event.timestamp / 1e9, attributes=dict(event.attributes))
                    for event in span.events
                ],
                error=span.status.description if span.status.status_code is StatusCode.ERROR else None,
                is_request=span.kind is SpanKind.SERVER,
            )
        )

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)

    def one(self, name: str) -> KeptSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def parent_of(self, name: str) -> str:
        """The name of a span's parent."""
        parent_id = self.one(name).parent_id
        [parent] = [span for span in self.spans if span.span_id == parent_id]
        return parent.name


def keeping(sample_ratio: float | None = 1.0, trusted: Trusted = "all") -> tuple[OtelTracer, Kept]:
    """A tracer whose monotonic clock is Unix time."""
    kept = Kept()
    provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
    provider.add_span_processor(kept)
    return OtelTracer(provider, sample_ratio, trusted=trusted, epoch_ns=lambda: 0), kept
