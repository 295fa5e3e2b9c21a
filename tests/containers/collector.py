"""In the place of OpenTelemetry's collector, of which there is no image here: receives spans over OTLP and counts them.

Runs in a container, from the router's image. It obeys the addresses of deploy/config/collector.yaml, and writes each
span's name and trace to its log.
"""

import http.server
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


class Collector(rpc.TraceServiceServicer):
    """Counts what comes."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        for of_process in request.resource_spans:
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    self.num_spans += 1
                    print(span.trace_id.hex(), span.name, flush=True)
        return pb.ExportTraceServiceResponse()


def main() -> None:
    """Serve until it is ended."""
    [config] = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("--config=")]
    text = Path(config).read_text(encoding="utf-8")
    grpc_at = re.search(r'endpoint: "([\d.:]+)"', text)
    metrics_at = re.search(r"prometheus: {host: ([\d.]+), port: (\d+)}", text)
    if grpc_at is None or metrics_at is None:
        raise SystemExit(f"{config} says neither where spans go nor where metrics are")
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(grpc_at[1])
    server.start()

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(f"otelcol_receiver_accepted_spans {collector.num_spans}\n".encode())

    http.server.HTTPServer((metrics_at[1], int(metrics_at[2])), Metrics).serve_forever()


if __name__ == "__main__":
    main()
