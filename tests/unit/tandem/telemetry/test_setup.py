"""How much is traced may be said anew while a process runs."""

import logging
from pathlib import Path

import pytest

from tandem.telemetry.setup import read_sampling_again
from tandem.telemetry.tracing import EndedSpan, NoTracer, RecordingTracer


class FirstId:
    """Draws ids that are all traced but at ratio 0."""

    def getrandbits(self, _bits: int) -> int:
        return 1


class NoSink:
    def take(self, span: EndedSpan) -> None:
        raise AssertionError(span)


@pytest.fixture
def tracer() -> RecordingTracer:
    return RecordingTracer(NoSink(), rng=FirstId(), sample_ratio=0.0)  # type: ignore[arg-type]


def test_what_the_file_says_holds_for_requests_that_begin_later(tmp_path: Path, tracer: RecordingTracer) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{telemetry: {otlp_endpoint: 'http://localhost:4317', sample_ratio: 0.5}}")
    assert tracer.request("before", None, 0.0) is None
    read_sampling_again(path, tracer)
    begun = tracer.request("after", None, 0.0)
    path.write_text("{telemetry: {otlp_endpoint: 'http://localhost:4317', sample_ratio: 0.0}}")
    read_sampling_again(path, tracer)
    assert begun is not None
    assert begun.child("of one under way", 0.0).context.sampled
    assert tracer.request("last", None, 0.0) is None


@pytest.mark.parametrize("content", ["{telemetry: {sample_ratio: 2}}", None])
def test_what_makes_no_sense_changes_nothing(
    tmp_path: Path, tracer: RecordingTracer, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    tracer.sample(1.0)
    with caplog.at_level(logging.ERROR):
        read_sampling_again(path, tracer)
    assert "what is traced stays as it was" in caplog.text
    assert tracer.request("as before", None, 0.0) is not None


def test_who_has_nowhere_to_send_spans_reads_nothing_into_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{telemetry: {sample_ratio: 1.0}}")
    tracer = NoTracer()
    read_sampling_again(path, tracer)
    read_sampling_again(None, tracer)
    assert tracer.request("any", None, 0.0) is None  # type: ignore[func-returns-value]
