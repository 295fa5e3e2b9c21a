"""An OTLP collector in the test's process: a real gRPC server of the OTLP protocol that keeps what it is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One span as it was sent."""

    name: str
    instance: str
    """The process that it is of; of a router without its host."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty at a root."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    state: str
    failed: bool


class OtlpReceiver(rpc.TraceServiceServicer):
    """All spans of all processes."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.metadata: list[dict[str, str]] = []
        self.port = 0
        self._came = asyncio.Event()

    async def Export(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        for of_process in request.resource_spans:
            instance = values(of_process.resource.attributes)["service.instance.id"].partition(".")[0]
            for scope in of_process.scope_spans:
                self.spans.extend(received(span, instance) for span in scope.spans)
        self._came.set()
        return pb.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def until(self, complete: Callable[[], bool]) -> None:
        """Until enough has come, however long it takes."""
        while not complete():
            self._came.clear()
            await self._came.wait()


def received(span: Any, instance: str) -> Received:
    return Received(
        name=span.name,
        instance=instance,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=values(span.attributes),
        events=[(event.name, event.time_unix_nano, values(event.attributes)) for event in span.events],
        state=span.trace_state,
        failed=span.status.code == 2,
    )


def values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


@asynccontextmanager
async def otlp_receiver(port: int = 0) -> AsyncIterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    server = grpc.aio.server()
    rpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)
