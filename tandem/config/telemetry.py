"""Sections `telemetry` and `profiling`: what processes tell about their work, and to whom."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from tandem.config.section import Section


class ObjectivesConfig(Section):
    """When a request went well: goodput counts those. Alarms have the same objectives, in the rules for Prometheus."""

    ttft_s: float = Field(default=2.5, gt=0.0)
    """Within which the first token comes."""
    per_token_s: float = Field(default=0.1, gt=0.0)
    """That a token after the first takes, in the mean of one request."""


def _printable(value: SecretStr) -> SecretStr:
    if not all(" " <= letter <= "~" for letter in value.get_secret_value()):
        raise ValueError("a header's value is printable ASCII, without line breaks")
    return value


_HeaderValue = Annotated[SecretStr, AfterValidator(_printable)]


class TelemetryConfig(Section):
    """Traces, and what is good. Metrics need no more configuration: every router serves /metrics."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    """http://host:port (https:// for TLS) of a collector that speaks OTLP over gRPC, such as http://localhost:4317;
    null: nothing is traced. Needs the `telemetry` extra."""
    otlp_headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], _HeaderValue] = Field(default={})
    """Sent with every batch, such as a key that the collector asks for."""
    sample_ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests that are traced."""
    trust_clients: Literal["all", "operators", "none"] = "operators"
    """Whose `traceparent` decides in place of it: everybody's, of operators' keys (without keys all are), nobody's."""
    objectives: ObjectivesConfig = ObjectivesConfig()


class ProfilingConfig(Section):
    """Traces of a worker's steps and flame graphs of a router. They tell names of code, counts and times."""

    enabled: bool = False
    """Serve /debug/profile/* to operators' keys. Off, there is no such route and workers have no such service."""
    max_seconds: Annotated[float, Field(ge=0.1, le=600.0)] = 60.0
    """Longest look."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Most steps of one trace."""
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 64 << 20
    """Largest trace, compressed; one that grows beyond it is thrown away."""
