"""Contexts as W3C has them, spans as they end, and what nobody traces."""

import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.telemetry import TelemetryConfig
from tandem.telemetry.setup import open_tracer
from tandem.telemetry.tracing import (
    MAX_EVENTS,
    MAX_TEXT_CHARS,
    NoTracer,
    TraceContext,
    Trusted,
    context_from_headers,
    context_from_text,
)
from tests.support.spans import CLIENT, keeping

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_clients_context() -> None:
    assert context_from_headers([GOOD], []) == TraceContext(trace_id=int(TRACE, 16), span_id=int(SPAN, 16))
    later_version = context_from_headers([f"cc-{TRACE}-{SPAN}-01-what-the-future-brings"], [])
    assert later_version == context_from_headers([GOOD], [])
    for flags, sampled in (("00", False), ("01", True), ("02", False), ("ff", True)):
        context = context_from_headers([f"00-{TRACE}-{SPAN}-{flags}"], [])
        assert context is not None
        assert context.sampled is sampled


@pytest.mark.parametrize(
    "parent",
    [
        "", "00", GOOD.upper(), GOOD + "-", GOOD + "-more", GOOD[:-1], " " * 600 + GOOD,
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0x",
        f"cc-{TRACE}-{SPAN}-01.more", f"0-{TRACE}-{SPAN}-01", f"00_{TRACE}_{SPAN}_01", GOOD + "\n00",
    ],
)  # fmt: skip
def test_a_malformed_context_is_none(parent: str) -> None:
    assert context_from_headers([parent], []) is None
    assert context_from_text(parent) is None


def test_two_parents_are_none() -> None:
    assert context_from_headers([GOOD, GOOD], []) is None
    assert context_from_headers([], ["a=1"]) is None


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (["vendor=opaque"], "vendor=opaque"),
        (["a=1, b=2 ", "tenant@vendor=x y"], "a=1,b=2,tenant@vendor=x y"),
        (["a=1,,b=2"], "a=1,b=2"),
        (["A=1"], ""),
        (["a=1,b"], ""),
        (["a=\x00"], ""),
        (["a=" + "x" * 600], ""),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
    ],
)
def test_a_malformed_state_is_dropped_alone(sent: list[str], kept: str) -> None:
    context = context_from_headers([GOOD], sent)
    assert context is not None
    assert context.state == kept
    assert context_from_text(context.to_text()) == context
    assert len(context.to_text()) <= MAX_TEXT_CHARS


@given(st.text(max_size=700))
def test_whatever_a_peer_sends_is_read_or_none(text: str) -> None:
    for context in (context_from_text(text), context_from_headers([text], [text])):
        assert context is None or context_from_text(context.to_text()) == context


def test_children_are_of_their_parents_and_keep_its_state() -> None:
    tracer, kept = keeping()
    client = TraceContext(trace_id=7, span_id=9, state="a=1")
    request = tracer.request("request", client, 10.0)
    assert request is not None
    child = request.child("child", 11.0)
    child.interval("grandchild", 11.5, 12.0, count=3)
    elsewhere = tracer.span("elsewhere", context_from_text(child.context.to_text()), 11.1)
    assert elsewhere is not None
    for span, end_s in ((elsewhere, 12.0), (child, 12.5), (request, 13.0)):
        span.end(end_s)
    assert kept.parent_of("grandchild") == kept.parent_of("elsewhere") == "child"
    assert kept.parent_of("child") == "request"
    assert kept.one("request").parent_id == 9
    assert (kept.one("request").is_request, kept.one("child").is_request) == (True, False)
    assert {span.context.trace_id for span in kept.spans} == {7}
    assert {span.context.state for span in kept.spans} == {"a=1"}
    assert len({span.context.span_id for span in kept.spans}) == 4
    grandchild = kept.one("grandchild")
    assert (grandchild.start_s, grandchild.end_s, grandchild.attributes) == (11.5, 12.0, {"count": 3})


def test_a_span_ends_once_and_its_events_are_bounded() -> None:
    tracer, kept = keeping()
    span = tracer.request("request", None, 1.0)
    assert span is not None
    for index in range(MAX_EVENTS + 5):
        span.event("chunk", 2.0, seq=index)
    span.fail("first")
    span.fail("second")
    span.end(3.0)
    span.event("late", 4.0)
    span.end(5.0)
    ended = kept.one("request")
    assert (ended.end_s, ended.error, len(ended.events)) == (3.0, "first", MAX_EVENTS)
    assert ended.attributes["tandem.dropped_events"] == 5
    assert ended.parent_id is None


def test_sampling_is_the_clients_or_a_share_of_all_traces() -> None:
    tracer, _ = keeping(sample_ratio=0.25)
    assert sum(tracer.request("request", None, 0.0) is not None for _ in range(4000)) == pytest.approx(1000, abs=120)
    assert tracer.request("request", CLIENT, 0.0) is not None
    unsampled = TraceContext(trace_id=1, span_id=2, sampled=False)
    assert tracer.request("request", unsampled, 0.0) is None
    assert tracer.span("span", unsampled, 0.0) is None
    assert tracer.span("span", None, 0.0) is None
    none, _ = keeping(sample_ratio=0.0)
    assert all(none.request("request", None, 0.0) is None for _ in range(100))
    everything, _ = keeping(sample_ratio=1.0)
    assert all(everything.request("request", None, 0.0) is not None for _ in range(100))


def test_nothing_is_traced_unless_somebody_listens() -> None:
    tracer = open_tracer(AsyncExitStack(), TelemetryConfig(), service="s", instance="i")
    assert isinstance(tracer, NoTracer)
    assert tracer.request("request", CLIENT, 0.0) is None
    assert tracer.span("span", CLIENT, 0.0) is None


def test_a_missing_library_is_named() -> None:
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "from contextlib import AsyncExitStack\n"
        "from tandem.config.cluster import TelemetryConfig\n"
        "from tandem.errors import ConfigError\n"
        "from tandem.telemetry.setup import open_tracer\n"
        "config = TelemetryConfig(otlp_endpoint='http://localhost:4317')\n"
        "try: open_tracer(AsyncExitStack(), config, service='s', instance='i')\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "telemetry.otlp_endpoint" in done.stdout
    assert "tandem-serve[telemetry]" in done.stdout


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host:1", "http://", "http://a/b c"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        TelemetryConfig(otlp_endpoint=endpoint)


@pytest.mark.parametrize(
    ("trusted", "by_operator", "follows"),
    [
        ("all", False, True),
        ("operators", False, False),
        ("operators", True, True),
        ("none", True, False),
    ],
)
def test_who_is_not_trusted_decides_nothing(trusted: Trusted, by_operator: bool, follows: bool) -> None:
    wanting, unwilling = CLIENT, replace(CLIENT, sampled=False)
    never, kept = keeping(sample_ratio=0.0, trusted=trusted)
    assert (never.request("r", wanting, 0.0, by_operator=by_operator) is not None) == follows
    always, kept = keeping(sample_ratio=1.0, trusted=trusted)
    span = always.request("r", wanting, 0.0, by_operator=by_operator)
    assert span is not None
    assert (span.context.trace_id == CLIENT.trace_id) == follows
    span.end(1.0)
    ended = kept.one("r")
    assert ended.is_request
    # Whoever gave it a name finds it by that all the same.
    named = None if follows else f"{CLIENT.trace_id:032x}"
    assert (ended.parent_id, ended.attributes.get("tandem.client_trace_id")) == (
        CLIENT.span_id if follows else None,
        named,
    )
    assert (always.request("r", unwilling, 0.0, by_operator=by_operator) is None) == follows
