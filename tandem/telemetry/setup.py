"""Chooses a process's tracer: none, or one whose spans leave over OTLP."""

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING

from tandem.errors import ConfigError
from tandem.telemetry.tracing import NoTracer, RecordingTracer, Tracer

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config.telemetry import TelemetryConfig

_log = logging.getLogger(__name__)


def instance_id(name: str) -> str:
    """The `service.instance.id` of this process: several routers of one host share its name and its ports."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}"


def open_tracer(stack: AsyncExitStack, config: "TelemetryConfig", *, service: str, instance: str) -> Tracer:
    """The tracer that the configuration asks for; spans still queued are sent when `stack` is left.

    `service` and `instance` name the process in every span. Raises ConfigError when OpenTelemetry is missing.
    """
    if config.otlp_endpoint is None:
        return NoTracer()
    try:
        from tandem.telemetry.otlp_exporter import OtlpSink
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint: {error.name} is not installed: `pip install 'tandem-serve[telemetry]'`"
        ) from None
    resource = {"service.namespace": "tandem", "service.name": service, "service.instance.id": instance}
    headers = {name: value.get_secret_value() for name, value in config.otlp_headers.items()}
    sink = OtlpSink(config.otlp_endpoint, resource, headers)
    stack.push_async_callback(asyncio.to_thread, sink.close)
    return RecordingTracer(sink, rng=SystemRandom(), sample_ratio=config.sample_ratio, trusted=config.trust_clients)


def read_sampling_again(path: Path | None, tracer: Tracer) -> None:
    """Trace that share of the requests from now on that the YAML names. In a thread: it reads a file.

    Without a path nothing is read, and what makes no sense changes nothing.
    """
    from tandem.config.cluster import load

    if path is None:
        return
    try:
        ratio = load(path).telemetry.sample_ratio
    except (ConfigError, OSError) as error:
        _log.error("%s; what is traced stays as it was", error)
        return
    tracer.sample(ratio)
