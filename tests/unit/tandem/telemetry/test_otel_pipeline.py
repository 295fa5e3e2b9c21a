"""Spans sent to a real receiver arrive complete, and a missing receiver costs no request."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from tandem.config.telemetry import TelemetryConfig
from tandem.telemetry import otel_pipeline
from tandem.telemetry.otel_pipeline import OtelPipeline, make_resource, open_pipeline
from tandem.telemetry.otel_tracer import OtelTracer
from tests.support.otlp_receiver import otlp_http_receiver, otlp_receiver
from tests.support.spans import context_of

SAID = {"text": "a", "yes": True, "count": 3, "seconds": 0.25, "reasons": ("stop", "length")}
RECEIVERS = {"grpc": otlp_receiver, "http/protobuf": otlp_http_receiver}


@contextmanager
def exporting(port: int, protocol: Any = "grpc") -> Iterator[tuple[OtelTracer, OtelPipeline]]:
    config = TelemetryConfig(
        otlp_endpoint=f"http://127.0.0.1:{port}",
        otlp_protocol=protocol,
        otlp_headers={"X-Key": "k"},
        trust_clients="all",
    )
    tracer, pipeline = open_pipeline(config, service="tandem-router", instance="router.host")
    try:
        yield tracer, pipeline
    finally:
        pipeline.close()


def end_span(tracer: OtelTracer, name: str = "span") -> None:
    span = tracer.request(name, None, 1.0)
    assert span is not None
    span.end(2.0)


@pytest.mark.parametrize("protocol", list(RECEIVERS))
async def test_pipeline_exports_all_span_fields(protocol: str) -> None:
    async with RECEIVERS[protocol]() as receiver:
        with exporting(receiver.port, protocol) as (tracer, pipeline):
            now_s, now_ns = time.monotonic(), time.time_ns()
            request = tracer.request("request", context_of(7, 9, state="a=1"), now_s)
            assert request is not None
            request.set_attributes(SAID)
            child = request.child("child", now_s)
            child.event("chunk", now_s + 0.25, seq=1)
            child.fail("broken")
            child.end(now_s + 0.5)
            request.end(now_s + 1.0)
            await asyncio.to_thread(pipeline.close)
    child, request = sorted(receiver.spans, key=lambda one: one.name)
    assert request.attributes == {**SAID, "reasons": ["stop", "length"]}
    assert (request.instance, request.trace_id, request.parent_id) == ("router", f"{7:032x}", f"{9:016x}")
    assert abs(request.start_ns - now_ns) < 1_000_000_000, "Unix time"
    assert (request.kind, child.kind) == ("SERVER", "INTERNAL")
    assert (child.parent_id, child.failed, child.state) == (request.span_id, True, "a=1")
    assert not request.failed
    assert child.end_ns - child.start_ns == pytest.approx(500_000_000, abs=2)
    [(name, at_ns, attributes)] = child.events
    assert (name, attributes) == ("chunk", {"seq": 1})
    assert at_ns - child.start_ns == pytest.approx(250_000_000, abs=2)
    assert {one["x-key"] for one in receiver.metadata} == {"k"}


@pytest.mark.parametrize("protocol", list(RECEIVERS))
async def test_pipeline_exports_burst_completely_and_once(protocol: str) -> None:
    async with RECEIVERS[protocol]() as receiver:
        with exporting(receiver.port, protocol) as (tracer, pipeline):

            def burst() -> None:
                for number in range(3000):
                    end_span(tracer, f"{number}")
                pipeline.close()

            # In a thread: the receiver answers on this loop, and is not away meanwhile.
            await asyncio.to_thread(burst)
    assert sorted(int(one.name) for one in receiver.spans) == list(range(3000))


async def test_pipeline_recovers_after_unreachable_receiver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    caplog.set_level(logging.WARNING)
    async with otlp_receiver() as receiver:
        port = receiver.port
    with exporting(port) as (tracer, pipeline):
        end_span(tracer, "lost")

        def is_logged(words: str) -> bool:
            return any(words in record.getMessage() for record in caplog.records)

        async with asyncio.timeout(60):
            while not is_logged("does not accept spans"):  # noqa: ASYNC110 - a thread says it
                await asyncio.sleep(0.01)
            async with otlp_receiver(port) as receiver:
                while not receiver.spans:
                    end_span(tracer, "found")
                    await asyncio.sleep(0.01)
                while not is_logged("spans are exported again"):  # noqa: ASYNC110 - likewise
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(pipeline.close)
    assert {one.name for one in receiver.spans} == {"found"}


class StuckExporter(SpanExporter):
    """Exports nothing until it is shut down."""

    def __init__(self) -> None:
        self.is_shut = threading.Event()
        self.num_spans = 0

    def export(self, spans: Any) -> Any:
        self.num_spans += len(spans)
        self.is_shut.wait()
        raise RuntimeError("metadata was invalid: [('x-key', 'se\ncret')]")

    def shutdown(self) -> None:
        self.is_shut.set()


def test_pipeline_stuck_receiver_bounds_queue_and_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_pipeline, "CLOSE_S", 0.05)
    exporter = StuckExporter()
    pipeline = OtelPipeline(exporter, make_resource("s", "i"))
    tracer = OtelTracer(pipeline.provider, 1.0)
    for _ in range(2 * otel_pipeline.QUEUE_SPANS):
        end_span(tracer)
    pipeline.close()
    assert exporter.is_shut.is_set(), "it waited for CLOSE_S, then broke the export off"
    for thread in threading.enumerate():
        if thread.name in ("OtelBatchSpanRecordProcessor", "otel-shutdown"):
            thread.join()
    assert exporter.num_spans <= otel_pipeline.QUEUE_SPANS + otel_pipeline.BATCH_SPANS


def test_pipeline_exporter_error_keeps_thread_and_hides_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = StuckExporter()
    exporter.is_shut.set()
    pipeline = OtelPipeline(exporter, make_resource("s", "i"))
    tracer = OtelTracer(pipeline.provider, 1.0)
    end_span(tracer)
    pipeline.provider.force_flush()
    end_span(tracer)
    pipeline.provider.force_flush()
    pipeline.close()
    assert exporter.num_spans == 2
    assert "RuntimeError" in caplog.text
    assert "cret" not in caplog.text


async def test_pipeline_receiver_refusal_is_one_short_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in otel_pipeline._SDK_LOGGERS:  # without what earlier tests have had logged
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    caplog.set_level(logging.WARNING)
    async with otlp_receiver(refusal="too old\n22:00:00 CRITICAL " + "x" * 4000) as receiver:
        with exporting(receiver.port) as (tracer, pipeline):
            for _ in range(3 * otel_pipeline.BATCH_SPANS):
                end_span(tracer)
            await asyncio.to_thread(pipeline.close)
    [line] = [message for record in caplog.records if "too old" in (message := record.getMessage())]
    assert "too old 22:00:00" in line
    assert len(line) < 400
    assert "\n" not in line
