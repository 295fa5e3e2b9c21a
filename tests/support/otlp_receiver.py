"""An OTLP collector in the test's process: real gRPC and HTTP servers of OTLP that keep what they are sent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    kind: str


class OtlpReceiver(rpc.TraceServiceServicer):
    """All spans of all processes."""

    def __init__(self, refusal: str | None = None) -> None:
        self.spans: list[Received] = []
        self.metadata: list[dict[str, str]] = []
        self.port = 0
        self._refusal = refusal
        self._came = asyncio.Event()

    async def Export(self, request, context):
        if self._refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refusal)
        self.metadata.append(dict(context.invocation_metadata()))
        self.spans.extend(received_in(request))
        self._came.set()
        return pb.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def until(self, complete: Callable[[], bool]) -> None:
        """Until enough has come, however long it takes."""
        while not complete():
            self._came.clear()
            await self._came.wait()


def received_in(request: Any) -> Iterator[Received]:
    for of_process in request.resource_spans:
        instance = values(of_process.resource.attributes)["service.instance.id"].partition(".")[0]
        for scope in of_process.scope_spans:
            yield from (received(span, instance) for span in scope.spans)


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
        kind={1: "INTERNAL", 2: "SERVER"}[span.kind],
    )


def values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


@asynccontextmanager
async def otlp_receiver(port: int = 0, refusal: str | None = None) -> AsyncIterator[OtlpReceiver]:
    """`refusal`: what it answers to every batch."""
    receiver = OtlpReceiver(refusal)
    server = grpc.aio.server()
    rpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


class OtlpHttpReceiver:
    """All spans that came over HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.spans: list[Received] = []
        self.metadata: list[dict[str, str]] = []


@asynccontextmanager
async def otlp_http_receiver() -> AsyncIterator[OtlpHttpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_otlp = (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            if is_otlp:
                # Before the answer: who has it may look at once.
                receiver.metadata.append({name.lower(): value for name, value in self.headers.items()})
                receiver.spans.extend(received_in(pb.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200 if is_otlp else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Keep tests' output to the tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpHttpReceiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            await asyncio.to_thread(server.shutdown)
            thread.join()
