"""A collector as far as a cluster is concerned: takes OTLP over gRPC, and counts the spans."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class SpanCounter:
    """Where spans go, and how many came."""

    def __init__(self) -> None:
        self.url = ""
        self.num_spans = 0

    async def export(self, request: Any, _context: Any) -> Any:
        self.num_spans += sum(
            len(scope.spans) for of_process in request.resource_spans for scope in of_process.scope_spans
        )
        return pb.ExportTraceServiceResponse()


@asynccontextmanager
async def span_counter() -> AsyncIterator[SpanCounter]:
    """One on a free port."""
    counter, server = SpanCounter(), grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        counter.export,
        request_deserializer=pb.ExportTraceServiceRequest.FromString,
        response_serializer=pb.ExportTraceServiceResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),))
    counter.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield counter
    finally:
        await server.stop(None)
