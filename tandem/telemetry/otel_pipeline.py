"""Builds a tracer that exports over OTLP from section `telemetry` and the OTEL_* variables.

A setting in the YAML overrides its variable; a variable overrides our defaults. Spans wait in the SDK's bounded queue
for its thread: when the receiver is too slow, spans are lost, but requests are not affected.
"""

import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tandem.errors import ConfigError
from tandem.telemetry.otel_tracer import OtelTracer

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config.telemetry import TelemetryConfig

QUEUE_SPANS = 8192
"""Spans that wait for a slow receiver, unless OTEL_BSP_MAX_QUEUE_SIZE is set; the oldest are dropped."""
BATCH_SPANS = 128
"""Spans per batch: encoding holds the GIL, and a larger batch would delay the event loop by milliseconds."""
DELAY_MS = 500.0
CLOSE_S = 3.0
_QUIET_S = 20.0
"""Minimum time between two log lines of the SDK with the same message."""
_MAX_LINE_CHARS = 300
_TRACES_PATH = "/v1/traces"
_SDK_LOGGERS = (
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_log = logging.getLogger(__name__)


class ReportingExporter(SpanExporter):
    """Exports through the SDK's exporter, logs when the receiver stops and resumes accepting spans, and counts lost
    ones."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._num_lost = 0
        """Spans lost since the receiver last accepted a batch."""
        self._close_lock = threading.Lock()
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001  # the message may have a header's secret: only its type is logged
            _log.warning("exporting spans raised %s", type(error).__name__)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                _log.warning("spans are exported again; %d were lost", self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            _log.warning("the OTLP receiver does not accept spans; they are dropped until it does")
        self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Abort a running export. Several threads may call it; only the first call counts."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _ShortLines(logging.Filter):
    """Shortens a library's log records to one line each, and passes each message at most once in 20 s.

    They quote the receiver's answers, which may be megabytes with every batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(str(record.msg), -_QUIET_S) < _QUIET_S:
            return False
        self._logged_s[str(record.msg)] = now_s
        record.msg, record.args = " ".join(record.getMessage().split())[:_MAX_LINE_CHARS], ()
        record.exc_info = record.exc_text = None
        return True


class OtelPipeline:
    """A provider whose spans are exported in batches, with a bounded shutdown."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        """Raises ValueError for an invalid OTEL_* variable."""
        self._exporter = ReportingExporter(exporter)
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else QUEUE_SPANS,
                schedule_delay_millis=None if OTEL_BSP_SCHEDULE_DELAY in os.environ else DELAY_MS,
                max_export_batch_size=None if OTEL_BSP_MAX_EXPORT_BATCH_SIZE in os.environ else BATCH_SPANS,
            )
        )

    def close(self) -> None:
        """Export queued spans, as far as the receiver accepts them within CLOSE_S. Blocks."""
        closing = threading.Thread(target=self.provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


def open_pipeline(config: "TelemetryConfig", *, service: str, instance: str) -> tuple[OtelTracer, OtelPipeline]:
    """Open the tracer and the pipeline to close. Raises ConfigError for invalid settings and variables."""
    _guard_logs()
    try:
        pipeline = OtelPipeline(_exporter(config), make_resource(service, instance))
    except ValueError as error:
        raise ConfigError(f"telemetry: a setting or an OTEL_* variable is invalid: {error}") from None
    return OtelTracer(pipeline.provider, config.sample_ratio, trusted=config.trust_clients), pipeline


def make_resource(service: str, instance: str) -> Resource:
    """The resource that describes this process.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence, except for `service.instance.id`: all processes of a
    host may have the same variables, and processes of one name must be distinguishable.
    """
    own: Mapping[str, str] = {
        "service.namespace": "tandem",
        "service.name": service,
        "service.version": _version(),
    }
    stated = OTELResourceDetector().detect().attributes
    defaults = {key: value for key, value in own.items() if key not in stated}
    return Resource.create({**defaults, "service.instance.id": instance})


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _exporter(config: "TelemetryConfig") -> SpanExporter:
    headers = {name.lower(): value.get_secret_value() for name, value in config.otlp_headers.items()} or None
    endpoint = config.otlp_endpoint
    if _protocol(config) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        insecure = None if endpoint is None else endpoint.startswith("http://")
        return GrpcExporter(endpoint=endpoint, insecure=insecure, headers=headers)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=None if endpoint is None else endpoint + _TRACES_PATH, headers=headers)


def _protocol(config: "TelemetryConfig") -> str:
    if config.otlp_protocol is not None:
        return config.otlp_protocol
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        if protocol := os.environ.get(variable, "").strip():
            if protocol not in ("grpc", "http/protobuf"):
                raise ConfigError(f"{variable} must be grpc or http/protobuf, got {protocol!r}")
            return protocol
    return "grpc"


def _guard_logs() -> None:
    for name in _SDK_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _ShortLines) for one in logger.filters):
            logger.addFilter(_ShortLines())
    # These would quote clients' input: malformed `tracestate` headers.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
