"""A process's tracer from the YAML and OTEL_* variables; a sample ratio that changes while it runs."""

import logging
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.config.telemetry import TelemetryConfig
from tandem.errors import ConfigError
from tandem.telemetry.otel_pipeline import make_resource
from tandem.telemetry.otel_tracer import OtelTracer
from tandem.telemetry.setup import open_tracer, reload_sample_ratio
from tandem.telemetry.tracing import NoTracer, Tracer
from tests.support.otlp_receiver import OtlpHttpReceiver, OtlpReceiver, otlp_http_receiver, otlp_receiver
from tests.support.spans import CLIENT, keeping


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def test_telemetry_reload_changes_ratio_for_new_requests(tmp_path: Path) -> None:
    tracer, _ = keeping(sample_ratio=0.0)
    path = tmp_path / "cluster.yaml"
    path.write_text("{telemetry: {otlp_endpoint: 'http://localhost:4317', sample_ratio: 1.0}}")
    assert tracer.request("before", None, 0.0) is None
    reload_sample_ratio(path, tracer)
    begun = tracer.request("after", None, 0.0)
    path.write_text("{telemetry: {otlp_endpoint: 'http://localhost:4317', sample_ratio: 0.0}}")
    reload_sample_ratio(path, tracer)
    assert begun is not None
    child = begun.child("of one under way", 0.0)
    assert tracer.span("elsewhere", child.context, 0.0) is not None
    assert tracer.request("last", None, 0.0) is None


@pytest.mark.parametrize("content", ["{telemetry: {sample_ratio: 2}}", None])
def test_telemetry_reload_invalid_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    tracer, _ = keeping(sample_ratio=1.0)
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    with caplog.at_level(logging.ERROR):
        reload_sample_ratio(path, tracer)
    assert "telemetry.sample_ratio stays as it was" in caplog.text
    assert tracer.request("as before", None, 0.0) is not None


def test_telemetry_reload_without_tracer_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{telemetry: {sample_ratio: 1.0}}")
    tracer = NoTracer()
    reload_sample_ratio(path, tracer)
    reload_sample_ratio(None, tracer)
    assert tracer.request("any", None, 0.0) is None


@pytest.mark.parametrize(
    ("sampler", "ratio", "is_traced"),
    [
        ("always_off", None, False),
        ("parentbased_always_on", None, True),
        ("always_off", 1.0, True),
        ("always_on", 0.0, False),
    ],
)
async def test_tracer_sampler_from_environment_unless_yaml_has_ratio(
    monkeypatch: pytest.MonkeyPatch, sampler: str, ratio: float | None, is_traced: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:1", sample_ratio=ratio)
    async with AsyncExitStack() as stack:
        tracer = open_tracer(stack, config, service="s", instance="i")
        assert (tracer.request("r", None, 0.0) is not None) == is_traced
        tracer.set_sample_ratio(1.0)
        assert tracer.request("r", None, 0.0) is not None
        tracer.set_sample_ratio(None)
        assert (tracer.request("r", None, 0.0) is not None) == (sampler != "always_off")


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_tracing_switched_off_by_the_environment_is_off(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(*variable.split("="))
    config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:1")
    assert isinstance(open_tracer(AsyncExitStack(), config, service="s", instance="i"), NoTracer)


def test_tracing_is_off_without_an_endpoint() -> None:
    tracer = open_tracer(AsyncExitStack(), TelemetryConfig(), service="s", instance="i")
    assert isinstance(tracer, NoTracer)
    assert tracer.request("request", CLIENT, 0.0) is None
    assert tracer.span("span", CLIENT, 0.0) is None


async def exported(tracer: Tracer, stack: AsyncExitStack, receiver: OtlpReceiver | OtlpHttpReceiver) -> Any:
    """The only span, and the metadata sent with it."""
    assert isinstance(tracer, OtelTracer)
    span = tracer.request("r", None, 1.0)
    assert span is not None
    span.end(2.0)
    await stack.aclose()
    [found] = receiver.spans
    [metadata] = receiver.metadata
    return found, metadata


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("by", ["yaml", "environment"])
async def test_tracer_endpoint_protocol_headers_from_yaml_or_environment(
    monkeypatch: pytest.MonkeyPatch, protocol: str, by: str
) -> None:
    open_receiver = otlp_receiver if protocol == "grpc" else otlp_http_receiver
    async with open_receiver() as receiver:
        url = f"http://127.0.0.1:{receiver.port}"
        config = TelemetryConfig()
        if by == "yaml":
            # What the YAML states wins over all of these.
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if protocol != "grpc" else "http/protobuf")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=other")
            config = TelemetryConfig(otlp_endpoint=url, otlp_protocol=protocol, otlp_headers={"X-Key": "k"})
        else:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k")
        stack = AsyncExitStack()
        tracer = open_tracer(stack, config, service="tandem-router", instance="router.host")
        found, metadata = await exported(tracer, stack, receiver)
    assert (found.name, found.instance) == ("r", "router")
    assert metadata["x-key"] == "k"


def test_tracer_resource_merges_environment_except_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = make_resource("tandem-router", "router.host.7").attributes
    assert (own["service.name"], own["service.namespace"]) == ("tandem-router", "tandem")
    assert own["service.instance.id"] == "router.host.7"
    assert own["service.version"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=one,service.version=9,k8s.pod.name=p")
    stated = make_resource("tandem-router", "router.host.7").attributes
    assert (stated["service.name"], stated["service.version"], stated["k8s.pod.name"]) == ("mine", "9", "p")
    assert stated["service.instance.id"] == "router.host.7", "several processes have the same environment"


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL=http/json", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT=soon", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE=1", "max_queue_size"),
    ],
)
def test_tracer_invalid_otel_variable_is_config_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, named: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=named):
        open_tracer(AsyncExitStack(), config, service="s", instance="i")


def run_without_opentelemetry(config: str, **environment: str) -> str:
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "from contextlib import AsyncExitStack\n"
        "from tandem.config.cluster import TelemetryConfig\n"
        "from tandem.errors import ConfigError\n"
        "from tandem.telemetry.setup import open_tracer\n"
        f"config = TelemetryConfig({config})\n"
        "try: print(type(open_tracer(AsyncExitStack(), config, service='s', instance='i')).__name__)\n"
        "except ConfigError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path), **environment}
    )
    return done.stdout + done.stderr


def test_tracing_without_library_named_in_yaml_is_error() -> None:
    output = run_without_opentelemetry("otlp_endpoint='http://localhost:4317'")
    assert "telemetry.otlp_endpoint" in output
    assert "tandem-serve[telemetry]" in output


def test_tracing_without_library_named_in_variable_is_logged() -> None:
    output = run_without_opentelemetry("", OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:4317")
    assert "NoTracer" in output
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is traced" in output
    assert "tandem-serve[telemetry]" in output


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host:1", "http://", "http://a/b c"])
def test_otlp_endpoint_invalid_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        TelemetryConfig(otlp_endpoint=endpoint)
