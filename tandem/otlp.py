"""Sends spans to an OTLP receiver over gRPC, from a thread of the OpenTelemetry SDK's own.

The only module that imports OpenTelemetry; nothing imports it unless `telemetry.otlp_endpoint` is set.
"""

import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from tandem.tracing import EndedSpan, TraceContext

_QUEUE = 8192
"""Spans that wait for a slow receiver; later ones are dropped."""
_BATCH = 512
_PERIOD_MS = 500.0
_TIMEOUT_S = 3.0
"""For one batch; then it is dropped."""
_CLOSE_S = 3.0
_NS = 1_000_000_000
_READINGS = 3
"""Of both clocks, of which the closest pair counts: this thread may be interrupted between them."""


class OtlpSink:
    """A `SpanSink`; one per process."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], headers: Mapping[str, str]) -> None:
        """`endpoint`: http://host:port (no encryption) or https://host:port."""
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=endpoint.startswith("http://"),
            headers=tuple((name.lower(), value) for name, value in headers.items()),
            timeout=_TIMEOUT_S,
        )
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=_QUEUE, schedule_delay_millis=_PERIOD_MS, max_export_batch_size=_BATCH
        )
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("tandem")

    def take(self, span: EndedSpan) -> None:
        """See SpanSink."""
        epoch_ns = _epoch_ns()
        parent = None if span.parent_id is None else _sdk_context(span.context, span.parent_id)
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_sdk_context(span.context, span.context.span_id),
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(event.name, event.attributes, epoch_ns + int(event.at_s * _NS)) for event in span.events],
                kind=SpanKind.SERVER if span.is_request else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=epoch_ns + int(span.start_s * _NS),
                end_time=epoch_ns + int(span.end_s * _NS),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is queued, as far as the receiver takes it within _CLOSE_S. Blocks."""
        # The SDK may try for half a minute, and a process that drains has less.
        closing = threading.Thread(target=self._processor.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _epoch_ns() -> int:
    """When the monotonic clock was 0. Read anew for each span, since the two clocks drift apart."""
    pauses = []
    for _ in range(_READINGS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        pauses.append((time.monotonic_ns() - before, wall - before))
    return min(pauses)[1]


def _sdk_context(context: TraceContext, span_id: int) -> SpanContext:
    return SpanContext(
        trace_id=context.trace_id,
        span_id=span_id,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )
