"""Sections `telemetry` and `profiling`: traces, latency objectives, profiles."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from tandem.config.section import Section


class ObjectivesConfig(Section):
    """Latency objectives: goodput counts requests that meet both. The Prometheus rules state the same values."""

    ttft_s: float = Field(default=2.5, gt=0.0)
    """Maximum time to first token."""
    per_token_s: float = Field(default=0.1, gt=0.0)
    """Maximum mean time between a request's tokens after the first."""


def _printable(value: SecretStr) -> SecretStr:
    if not all(" " <= letter <= "~" for letter in value.get_secret_value()):
        raise ValueError("a header's value must be printable ASCII without line breaks")
    return value


_HeaderValue = Annotated[SecretStr, AfterValidator(_printable)]


class TelemetryConfig(Section):
    """Traces and latency objectives. Metrics need no configuration: every router serves /metrics."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    """http://host:port (https:// for TLS) of an OTLP collector, such as http://localhost:4317. null:
    OTEL_EXPORTER_OTLP_ENDPOINT; without that variable nothing is traced. Needs the `telemetry` extra."""
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = None
    """Over HTTP, spans go to /v1/traces at the endpoint. null: OTEL_EXPORTER_OTLP_PROTOCOL, else gRPC."""
    otlp_headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], _HeaderValue] = Field(default={})
    """Sent with every batch, such as an API key of the collector. Empty: OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of requests that are traced. null: OTEL_TRACES_SAMPLER, else every request."""
    trust_clients: Literal["all", "operators", "none"] = "operators"
    """Clients whose `traceparent` overrides it: all, only those with an operator's key (all if no API keys are
    configured), or none."""
    objectives: ObjectivesConfig = ObjectivesConfig()


class ProfilingConfig(Section):
    """Step traces of workers and flame graphs of routers. They contain function names, counts and times."""

    enabled: bool = False
    """Serve /debug/profile/* to operator keys. When off, routers have no such routes and workers no such service."""
    max_seconds: Annotated[float, Field(ge=0.1, le=600.0)] = 60.0
    """Maximum duration of one profile."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Maximum number of steps in one trace."""
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 64 << 20
    """Maximum compressed size of a trace; a larger one is discarded."""
