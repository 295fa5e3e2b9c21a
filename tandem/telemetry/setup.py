"""Chooses a process's tracer: none, or one that exports spans over OTLP."""

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import ConfigError
from tandem.telemetry.tracing import NoTracer, Tracer

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config.telemetry import TelemetryConfig

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "`pip install 'tandem-serve[telemetry]'`"
_log = logging.getLogger(__name__)


def instance_id(name: str) -> str:
    """The `service.instance.id` of this process: several routers of one host share its name and its ports."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}"


def open_tracer(stack: AsyncExitStack, config: "TelemetryConfig", *, service: str, instance: str) -> Tracer:
    """Open the tracer for the YAML's endpoint, or for OTEL_EXPORTER_OTLP_ENDPOINT where the YAML has none.

    Queued spans are exported when `stack` is left. `service` and `instance` name the process in every span. Raises
    ConfigError when the YAML enables tracing and OpenTelemetry is missing; if only a variable does, which a platform
    may set for everything that it runs, an error is logged instead.
    """
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    is_off = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none" or _is_true("OTEL_SDK_DISABLED")
    if is_off or (config.otlp_endpoint is None and variable is None):
        return NoTracer()
    try:
        from tandem.telemetry.otel_pipeline import open_pipeline
    except ImportError as error:
        if config.otlp_endpoint is not None:
            raise ConfigError(f"telemetry.otlp_endpoint: {error.name} is not installed: {_INSTALL}") from None
        _log.error("%s is set, but nothing is traced: %s is not installed: %s", variable, error.name, _INSTALL)
        return NoTracer()
    tracer, pipeline = open_pipeline(config, service=service, instance=instance)
    stack.push_async_callback(asyncio.to_thread, pipeline.close)
    return tracer


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() == "true"


def reload_sample_ratio(path: Path | None, tracer: Tracer) -> None:
    """Apply the sample ratio that the YAML has now. Reads a file, so it runs in a thread.

    Without a path nothing is read, and an invalid file changes nothing.
    """
    from tandem.config.cluster import load

    if path is None:
        return
    try:
        ratio = load(path).telemetry.sample_ratio
    except (ConfigError, OSError) as error:
        _log.error("%s; telemetry.sample_ratio stays as it was", error)
        return
    tracer.set_sample_ratio(ratio)
