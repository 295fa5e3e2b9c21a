"""Trace contexts between processes, finished spans, and untraced requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry.tracing import (
    MAX_EVENTS,
    MAX_STATE_CHARS,
    MAX_TEXT_CHARS,
    TraceContext,
    Trusted,
    context_from_headers,
    context_from_text,
)
from tests.support.spans import CLIENT, CLIENT_SPAN_ID, CLIENT_TRACE_ID, context_of, keeping

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("parent", [GOOD, f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", f"00-{TRACE}-{SPAN}-ff"])
def test_tracer_sampled_traceparent_continues_the_trace(parent: str) -> None:
    tracer, kept = keeping(sample_ratio=0.0)
    span = tracer.request("r", context_from_headers([parent], []), 0.0)
    assert span is not None
    span.end(1.0)
    assert (kept.one("r").trace_id, kept.one("r").parent_id) == (int(TRACE, 16), int(SPAN, 16))


@pytest.mark.parametrize("flags", ["00", "02"])
def test_tracer_unsampled_traceparent_is_not_traced(flags: str) -> None:
    tracer, _ = keeping(sample_ratio=1.0)
    context = context_from_headers([f"00-{TRACE}-{SPAN}-{flags}"], [])
    assert tracer.request("r", context, 0.0) is None
    assert tracer.span("s", context, 0.0) is None


@pytest.mark.parametrize(
    "parent",
    [
        "", "00", GOOD.upper(), GOOD + "-", GOOD + "-more", GOOD[:-1], " " * 600 + GOOD,
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0x",
        f"cc-{TRACE}-{SPAN}-01.more", f"0-{TRACE}-{SPAN}-01", f"00_{TRACE}_{SPAN}_01", GOOD + "\n00",
    ],
)  # fmt: skip
def test_tracer_malformed_traceparent_starts_trace_only_at_server(parent: str) -> None:
    tracer, kept = keeping()
    request = tracer.request("r", context_from_headers([parent], []), 0.0)
    assert request is not None
    request.end(1.0)
    assert kept.one("r").parent_id is None
    assert tracer.span("s", context_from_headers([parent], []), 0.0) is None
    assert tracer.span("s", context_from_text(parent), 0.0) is None


def test_context_from_headers_needs_exactly_one_traceparent() -> None:
    assert context_from_headers([GOOD, GOOD], []) is None
    assert context_from_headers([], ["a=1"]) is None


@pytest.mark.parametrize(
    ("sent", "kept_state"),
    [
        (["vendor=opaque"], "vendor=opaque"),
        (["a=1, b=2 ", "tenant@vendor=x y"], "a=1,b=2,tenant@vendor=x y"),
        (["a=1,,b=2"], "a=1,b=2"),
        (["a=1,b"], ""),
        (["a=\x00"], ""),
        (["a=" + "x" * 600], ""),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
    ],
)
def test_tracer_malformed_tracestate_is_dropped_alone(sent: list[str], kept_state: str) -> None:
    tracer, kept = keeping()
    span = tracer.request("r", context_from_headers([GOOD], sent), 0.0)
    assert span is not None
    assert context_from_text(span.context.to_text()) == span.context
    assert len(span.context.to_text()) <= MAX_TEXT_CHARS
    span.end(1.0)
    assert (kept.one("r").context.tracestate, kept.one("r").trace_id) == (kept_state, int(TRACE, 16))


@given(st.text(max_size=700))
def test_tracer_arbitrary_peer_text_never_raises(text: str) -> None:
    tracer, _ = keeping()
    for context in (context_from_text(text), context_from_headers([text], [text])):
        assert context is None or len(context.to_text()) <= MAX_TEXT_CHARS + MAX_STATE_CHARS
        tracer.span("s", context, 0.0)
        assert tracer.request("r", context, 0.0) is not None


def test_child_spans_keep_parent_and_tracestate() -> None:
    tracer, kept = keeping()
    client = context_of(7, 9, state="a=1")
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
    assert {span.trace_id for span in kept.spans} == {7}
    assert request.trace_id == f"{7:032x}"
    assert {span.context.tracestate for span in kept.spans} == {"a=1"}
    assert len({span.span_id for span in kept.spans}) == 4
    grandchild = kept.one("grandchild")
    assert (grandchild.start_s, grandchild.end_s, grandchild.attributes) == (11.5, 12.0, {"count": 3})


def test_span_ends_once_with_bounded_events() -> None:
    tracer, kept = keeping()
    span = tracer.request("request", None, 1.0)
    assert span is not None
    for index in range(MAX_EVENTS + 5):
        span.event("chunk", 2.0, seq=index)
    span.fail("first")
    span.fail("second")
    span.end(3.0)
    span.event("late", 4.0)
    span.set_attributes({"late": True})
    span.end(5.0)
    ended = kept.one("request")
    assert (ended.end_s, ended.error, len(ended.events)) == (3.0, "first", MAX_EVENTS)
    assert [event.attributes["seq"] for event in ended.events] == list(range(MAX_EVENTS)), "the first ones are kept"
    assert ended.attributes == {"tandem.dropped_events": 5}
    assert ended.parent_id is None


def test_span_end_before_its_start_has_no_duration() -> None:
    tracer, kept = keeping()
    span = tracer.request("request", None, 3.0)
    assert span is not None
    span.end(1.0)
    assert (kept.one("request").start_s, kept.one("request").end_s) == (3.0, 3.0)


def test_tracer_ratio_samples_new_traces_and_follows_clients() -> None:
    tracer, _ = keeping(sample_ratio=0.25)
    assert sum(tracer.request("request", None, 0.0) is not None for _ in range(4000)) == pytest.approx(1000, abs=150)
    assert tracer.request("request", CLIENT, 0.0) is not None
    unsampled = context_of(1, 2, sampled=False)
    assert tracer.request("request", unsampled, 0.0) is None
    assert tracer.span("span", unsampled, 0.0) is None
    assert tracer.span("span", None, 0.0) is None
    none, _ = keeping(sample_ratio=0.0)
    assert all(none.request("request", None, 0.0) is None for _ in range(100))
    everything, _ = keeping(sample_ratio=1.0)
    assert all(everything.request("request", None, 0.0) is not None for _ in range(100))


@pytest.mark.parametrize(
    ("trusted", "by_operator", "follows"),
    [
        ("all", False, True),
        ("operators", False, False),
        ("operators", True, True),
        ("none", True, False),
    ],
)
def test_tracer_ignores_sampling_of_untrusted_client(trusted: Trusted, by_operator: bool, follows: bool) -> None:
    wanting, unwilling = CLIENT, context_of(CLIENT_TRACE_ID, CLIENT_SPAN_ID, sampled=False)
    never, kept = keeping(sample_ratio=0.0, trusted=trusted)
    assert (never.request("r", wanting, 0.0, by_operator=by_operator) is not None) == follows
    always, kept = keeping(sample_ratio=1.0, trusted=trusted)
    span = always.request("r", wanting, 0.0, by_operator=by_operator)
    assert span is not None
    span.end(1.0)
    ended = kept.one("r")
    assert (ended.trace_id == CLIENT_TRACE_ID) == follows
    assert ended.is_request
    # A client finds its request by the trace id that it sent all the same.
    named = None if follows else f"{CLIENT_TRACE_ID:032x}"
    assert (ended.parent_id, ended.attributes.get("tandem.client_trace_id")) == (
        CLIENT_SPAN_ID if follows else None,
        named,
    )
    assert (always.request("r", unwilling, 0.0, by_operator=by_operator) is None) == follows
    malformed = TraceContext(traceparent="nonsense")
    span = always.request("malformed", malformed, 0.0, by_operator=by_operator)
    assert span is not None
    span.end(1.0)
    assert kept.one("malformed").attributes == {}
