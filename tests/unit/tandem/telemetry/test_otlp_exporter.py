"""Spans on their way to a real receiver: all that they say arrives, and a receiver that is not there costs nothing."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tandem.telemetry import otlp_exporter
from tandem.telemetry.otlp_exporter import OtlpSink
from tandem.telemetry.tracing import EndedSpan, SpanEvent, TraceContext
from tests.support.otlp_receiver import otlp_receiver

RESOURCE = {"service.name": "tandem-router", "service.instance.id": "router.host"}
SAID = {"text": "a", "yes": True, "count": 3, "seconds": 0.25, "reasons": ("stop", "length")}


def span(number: int = 1, *, error: str | None = None, is_request: bool = False) -> EndedSpan:
    return EndedSpan(
        name=f"span {number}",
        context=TraceContext(trace_id=7, span_id=number, state="a=1"),
        parent_id=None if is_request else 9,
        start_s=100.0,
        end_s=100.5,
        attributes=SAID,
        events=[SpanEvent(name="chunk", at_s=100.25, attributes={"seq": 1})],
        error=error,
        is_request=is_request,
    )


@contextmanager
def sink_to(port: int) -> Iterator[OtlpSink]:
    sink = OtlpSink(f"http://127.0.0.1:{port}", RESOURCE, {"X-Key": "k"})
    try:
        yield sink
    finally:
        sink.close()


async def test_all_that_a_span_says_arrives() -> None:
    async with otlp_receiver() as receiver:
        sink = OtlpSink(f"http://127.0.0.1:{receiver.port}", RESOURCE, {"X-Key": "k"})
        sink.take(span(1, is_request=True))
        sink.take(span(2, error="broken"))
        await asyncio.to_thread(sink.close)
    request, child = sorted(receiver.spans, key=lambda one: one.name)
    assert request.attributes == {**SAID, "reasons": ["stop", "length"]}
    assert (request.instance, request.parent_id, request.failed) == ("router", "", False)
    assert (child.parent_id, child.failed, child.state) == (f"{9:016x}", True, "a=1")
    assert child.end_ns - child.start_ns == 500_000_000
    [(name, at_ns, said)] = child.events
    assert (name, at_ns - child.start_ns, said) == ("chunk", 250_000_000, {"seq": 1})
    assert {one["x-key"] for one in receiver.metadata} == {"k"}


async def test_a_burst_arrives_whole_and_once() -> None:
    async with otlp_receiver() as receiver:
        sink = OtlpSink(f"http://127.0.0.1:{receiver.port}", RESOURCE, {})
        for number in range(1, 3001):
            sink.take(span(number))
        await asyncio.to_thread(sink.close)
    assert sorted(int(one.span_id, 16) for one in receiver.spans) == list(range(1, 3001))


async def test_a_receiver_that_is_away_costs_spans_and_is_found_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp_exporter, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(otlp_exporter, "_PERIOD_S", 0.01)
    caplog.set_level(logging.WARNING)
    async with otlp_receiver() as receiver:
        port = receiver.port
    with sink_to(port) as sink:
        sink.take(span(1))

        def said(words: str) -> bool:
            return any(words in record.message for record in caplog.records)

        async with asyncio.timeout(60):
            while not said("takes no spans"):  # noqa: ASYNC110 - a thread says it
                await asyncio.sleep(0.01)
            async with otlp_receiver(port) as receiver:
                while not receiver.spans:
                    sink.take(span(2))
                    await asyncio.sleep(0.01)
                while not said("takes spans again"):  # noqa: ASYNC110 - likewise
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(sink.close)
    assert {one.name for one in receiver.spans} == {"span 2"}


def test_what_waits_for_a_receiver_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_exporter, "_CLOSE_S", 0.1)
    with sink_to(1) as sink:
        for number in range(1, 3 * otlp_exporter._QUEUE):
            sink.take(span(number))
            assert len(sink._queue) <= otlp_exporter._QUEUE


async def test_a_header_that_cannot_be_sent_ends_no_thread_and_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp_exporter, "_PERIOD_S", 0.01)
    caplog.set_level(logging.WARNING)
    async with otlp_receiver() as receiver:
        sink = OtlpSink(f"http://127.0.0.1:{receiver.port}", RESOURCE, {"X-Key": "se\ncret"})
        sink.take(span(1))
        async with asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110 - a thread says it
                await asyncio.sleep(0.01)
        assert sink._thread.is_alive()
        await asyncio.to_thread(sink.close)
    assert "takes no spans" in caplog.text
    assert "cret" not in caplog.text


def test_what_a_receiver_says_is_one_short_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = ExportTraceServiceResponse()
    told.partial_success.rejected_spans = 3
    told.partial_success.error_message = "too old\n22:00:00 CRITICAL " + "x" * (1 << 20)
    with sink_to(1) as sink:
        monkeypatch.setattr(sink, "_call", lambda *_, **__: told)
        assert sink._send([span()])
    [line] = [record.getMessage() for record in caplog.records]
    assert "rejected 3 spans: too old 22:00:00" in line
    assert len(line) < 400
    assert "\n" not in line
