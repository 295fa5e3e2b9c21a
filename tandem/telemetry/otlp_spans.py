"""Spans in OTLP's protobuf messages. Written to be quick: it is all that tracing costs a process by the span."""

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as pb

from tandem.telemetry.tracing import Attribute, EndedSpan

_NS = 1_000_000_000
_SAMPLED = 1


def resource_to_pb(attributes: Mapping[str, Attribute]) -> Resource:
    """The process that spans are of."""
    resource = Resource()
    _fill(resource.attributes, attributes)
    return resource


def new_request(resource: Resource) -> tuple[ExportTraceServiceRequest, pb.ScopeSpans]:
    """An empty batch, and where its spans go."""
    request = ExportTraceServiceRequest()
    of_process = request.resource_spans.add(resource=resource)
    spans = of_process.scope_spans.add()
    spans.scope.name = "tandem"
    return request, spans


def add_spans(into: pb.ScopeSpans, spans: Iterable[EndedSpan], epoch_ns: int) -> None:
    """`epoch_ns`: Unix time at which the monotonic clock was 0."""
    for span in spans:
        context = span.context
        told = into.spans.add(
            trace_id=context.trace_id.to_bytes(16, "big"),
            span_id=context.span_id.to_bytes(8, "big"),
            trace_state=context.state,
            parent_span_id=b"" if span.parent_id is None else span.parent_id.to_bytes(8, "big"),
            flags=_SAMPLED,
            name=span.name,
            kind=pb.Span.SPAN_KIND_SERVER if span.is_request else pb.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=epoch_ns + int(span.start_s * _NS),
            end_time_unix_nano=epoch_ns + int(span.end_s * _NS),
        )
        _fill(told.attributes, span.attributes)
        for event in span.events:
            moment = told.events.add(name=event.name, time_unix_nano=epoch_ns + int(event.at_s * _NS))
            _fill(moment.attributes, event.attributes)
        if span.error is not None:
            told.status.code = pb.Status.STATUS_CODE_ERROR
            told.status.message = span.error


def _fill(pairs: Any, attributes: Mapping[str, Attribute]) -> None:
    """Fields set in place: half the time of messages made and then copied in."""
    for key, value in attributes.items():
        pair = pairs.add(key=key)
        if isinstance(value, str):
            pair.value.string_value = value
        elif isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, float):
            pair.value.double_value = value
        else:
            pair.value.array_value.values.extend([AnyValue(string_value=text) for text in value])
