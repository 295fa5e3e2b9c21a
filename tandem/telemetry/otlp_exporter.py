"""Sends spans to an OTLP receiver over gRPC, from a thread of its own.

Whoever ends a span only puts it into a bounded queue. What the receiver does not take in time is dropped and counted:
it costs spans, never requests. Imported only when `telemetry.otlp_endpoint` is set.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tandem.telemetry.otlp_spans import add_spans, new_request, resource_to_pb
from tandem.telemetry.tracing import EndedSpan

_QUEUE = 8192
"""Spans that wait for a slow receiver; later ones are dropped."""
_BATCH = 512
_SLICE = 64
"""Spans made into messages in one go, while the event loop may be waiting for the interpreter."""
_PERIOD_S = 0.5
_TIMEOUT_S = 3.0
"""For one batch; then it is dropped."""
_CLOSE_S = 3.0
_MOST_SHOWN = 200
"""Characters of what a receiver says."""
_READINGS = 3
"""Of both clocks, of which the closest pair counts: this thread may be interrupted between them."""
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_RETRIES = {
    "name": [{}],
    "retryPolicy": {
        "maxAttempts": 4,
        "initialBackoff": "0.2s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}
# No keepalive: collectors close connections that ping without being asked.
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.service_config", json.dumps({"methodConfig": [_RETRIES]})),
)
_log = logging.getLogger(__name__)


class OtlpSink:
    """A `SpanSink`; one per process."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], headers: Mapping[str, str]) -> None:
        """`endpoint`: http://host:port (no encryption) or https://host:port."""
        self._endpoint = endpoint
        self._channel = _channel(endpoint)
        self._call = self._channel.unary_unary(
            _METHOD,
            request_serializer=ExportTraceServiceRequest.SerializeToString,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._resource = resource_to_pb(resource)
        self._queue: deque[EndedSpan] = deque()
        self._not_queued = 0
        self._told_not_queued = 0
        self._not_taken = 0
        """Since the receiver last took a batch."""
        self._wake = threading.Event()
        self._end_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def take(self, span: EndedSpan) -> None:
        if len(self._queue) >= _QUEUE:
            self._not_queued += 1
            return
        self._queue.append(span)
        if len(self._queue) == _BATCH:
            self._wake.set()

    def close(self) -> None:
        """Send what is queued, as far as the receiver takes it within _CLOSE_S. Blocks."""
        self._end_s = time.monotonic() + _CLOSE_S
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._channel.close()

    def _run(self) -> None:
        while self._end_s is None:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            if not self._send(batch) and self._end_s is not None:
                self._queue.clear()

    def _send(self, batch: list[EndedSpan]) -> bool:
        request, spans = new_request(self._resource)
        for first in range(0, len(batch), _SLICE):
            add_spans(spans, batch[first : first + _SLICE], _epoch_ns())
            time.sleep(0)  # waits for nothing: it gives the interpreter's lock away, so that the event loop may go on
        timeout_s = _TIMEOUT_S if self._end_s is None else min(_TIMEOUT_S, self._end_s - time.monotonic())
        if timeout_s <= 0.0:
            return False
        try:
            answer = self._call(request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            self._failed(len(batch), f"{error.code().name}: {_shown(error.details())}")
            return False
        except Exception as error:  # noqa: BLE001  # the thread must live; gRPC's words may have a header's secret
            self._failed(len(batch), type(error).__name__)
            return False
        if rejected := answer.partial_success.rejected_spans:
            why = _shown(answer.partial_success.error_message)
            _log.warning("%s rejected %d spans: %s", self._endpoint, rejected, why)
        self._taken()
        return True

    def _failed(self, num_spans: int, why: str) -> None:
        if not self._not_taken:
            _log.warning("%s takes no spans, they are dropped until it does: %s", self._endpoint, why)
        self._not_taken += num_spans

    def _taken(self) -> None:
        dropped = self._not_taken + self._not_queued - self._told_not_queued
        if dropped:
            _log.warning("%s takes spans again; %d were dropped", self._endpoint, dropped)
        self._not_taken, self._told_not_queued = 0, self._not_queued


def _shown(told: str | None) -> str:
    """A receiver's words as one line of the log: they may be megabytes, with each batch again."""
    return " ".join((told or "").split())[:_MOST_SHOWN]


def _channel(endpoint: str) -> Any:
    scheme, _, address = endpoint.partition("://")
    if scheme == "https":
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(), options=_OPTIONS)
    return grpc.insecure_channel(address, options=_OPTIONS)


def _epoch_ns() -> int:
    """When the monotonic clock was 0. Read anew for each slice, since the two clocks drift apart."""
    pauses = []
    for _ in range(_READINGS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        pauses.append((time.monotonic_ns() - before, wall - before))
    return min(pauses)[1]
