"""Traces: where one request's time went, over all processes that had it.

A trace is born at a door (or comes with the client's W3C `traceparent`), and its context travels as one string:
router → decode worker → prefill worker → whoever lends a prefix. Spans are made of times that were measured anyway;
what becomes of one that has ended is a `SpanSink`'s business (`tandem/telemetry/otlp_exporter.py`). Attributes are
counts, names and times, never prompts or tokens.

Whoever is not traced holds None instead of a span: that costs one comparison and no memory.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

Attribute = str | bool | int | float | tuple[str, ...]
Trusted = Literal["all", "operators", "none"]
"""Whose word counts on whether they are traced, and under which name."""

MAX_STATE_CHARS = 512
MAX_TEXT_CHARS = 56 + MAX_STATE_CHARS
MAX_EVENTS = 128
"""Of one span: a long prompt may travel in thousands of chunks. Later ones are counted."""
_MAX_STATE_MEMBERS = 32
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The name of one span, so that spans of other processes can be its children (W3C Trace Context, level 1)."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    sampled: bool = True
    state: str = ""
    """`tracestate`: other systems' words, handed on unread."""

    def to_text(self) -> str:
        """`traceparent`, and `tracestate` behind a space when there is one."""
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"
        return f"{parent} {self.state}" if self.state else parent


def context_from_text(text: str) -> TraceContext | None:
    """What `to_text` made, from a peer; None for anything else."""
    if len(text) > MAX_TEXT_CHARS:
        return None
    parent, _, state = text.partition(" ")
    return context_from_headers([parent], [state] if state else [])


def context_from_headers(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """The client's context, from all values of `traceparent` and `tracestate`.

    None when there is none or it is malformed: a trace then begins here. A malformed state alone is dropped.
    """
    if len(parents) != 1 or len(parents[0]) > MAX_TEXT_CHARS:
        return None
    match = _PARENT.fullmatch(parents[0].strip(" \t"))
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id, flags = (int(match[group], 16) for group in (2, 3, 4))
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=bool(flags & 1), state=_state(states))


def _state(values: Sequence[str]) -> str:
    members = [member for value in values for part in value.split(",") if (member := part.strip(" \t"))]
    joined = ",".join(members)
    if len(members) > _MAX_STATE_MEMBERS or len(joined) > MAX_STATE_CHARS:
        return ""
    return joined if all(map(_MEMBER.fullmatch, members)) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    at_s: float
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSpan:
    """All of a span. Times are of the process's monotonic clock."""

    name: str
    context: TraceContext
    parent_id: int | None
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute]
    events: Sequence[SpanEvent]
    error: str | None
    is_request: bool
    """A client waits for its end."""


class SpanSink(Protocol):
    """Takes spans that have ended."""

    def take(self, span: EndedSpan) -> None:
        """Never waits and never raises: what is too much is dropped."""
        ...


class Span:
    """A span under way. On one thread; nothing of it is kept anywhere until it ends."""

    __slots__ = ("_ended", "_error", "_events", "_name", "_num_events", "_parent_id", "_recorder", "_start_s",
                 "attributes", "context", "is_request")  # fmt: skip

    def __init__(
        self, recorder: "RecordingTracer", name: str, context: TraceContext, parent_id: int | None, start_s: float
    ) -> None:
        self.context = context
        self.attributes: dict[str, Attribute] = {}
        self.is_request = False
        self._recorder = recorder
        self._name = name
        self._parent_id = parent_id
        self._start_s = start_s
        self._events: list[SpanEvent] = []
        self._num_events = 0
        self._error: str | None = None
        self._ended = False

    @property
    def trace_id(self) -> str:
        """As it is written everywhere: 32 hexadecimal digits."""
        return f"{self.context.trace_id:032x}"

    def now(self) -> float:
        """By the clock that all of the process's spans are timed by."""
        return self._recorder.clock()

    def child(self, name: str, start_s: float) -> "Span":
        """A span of the same process that this one caused."""
        return self._recorder.open(name, self.context, start_s)

    def interval(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """A child that is over."""
        span = self.child(name, start_s)
        span.attributes.update(attributes)
        span.end(end_s)

    def event(self, name: str, at_s: float, **attributes: Attribute) -> None:
        """One moment; those beyond MAX_EVENTS are only counted."""
        if self._ended:
            return
        self._num_events += 1
        if len(self._events) < MAX_EVENTS:
            self._events.append(SpanEvent(name=name, at_s=at_s, attributes=attributes))

    def fail(self, error: str) -> None:
        """It will have ended in an error; the first one stands."""
        self._error = self._error or error

    def end(self, at_s: float | None = None) -> None:
        """It is over, now when no time is given; only the first end counts."""
        if self._ended:
            return
        self._ended = True
        if self._num_events > len(self._events):
            self.attributes["tandem.dropped_events"] = self._num_events - len(self._events)
        self._recorder.sink.take(
            EndedSpan(
                name=self._name,
                context=self.context,
                parent_id=self._parent_id,
                start_s=self._start_s,
                end_s=max(self._start_s, self._recorder.clock() if at_s is None else at_s),
                attributes=self.attributes,
                events=self._events,
                error=self._error,
                is_request=self.is_request,
            )
        )


class Tracer(Protocol):
    """Begins what comes from outside the process: requests at a door, orders at a worker."""

    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        """A request of a client, which may be in a trace already; None when it is not to be traced.

        `by_operator`: whoever asks may do what operators may.
        """
        ...

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        """A child of a span that may be another process's, from now when no time is given; None without a parent."""
        ...

    def sample(self, ratio: float) -> None:
        """Trace such a share of the requests that begin from now on; those under way stay as they are."""
        ...


class NoTracer:
    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        """None."""

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        """None."""

    def sample(self, ratio: float) -> None:
        """Still nothing: there is nowhere to send it."""


class RecordingTracer:
    """Traces what is sampled: a trusted client's own word decides, else `sample_ratio` of all traces, by lot.

    Whoever is not trusted can neither have its requests traced nor keep them from it, nor choose their traces' names:
    who could would fill the queue of spans, or somebody else's trace. The name that it gave becomes an attribute.
    """

    def __init__(
        self,
        sink: SpanSink,
        *,
        rng: Random,
        sample_ratio: float = 1.0,
        trusted: Trusted = "all",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink = sink
        self.clock = clock
        self._rng = rng
        self._trusted = trusted
        self.sample(sample_ratio)

    def sample(self, ratio: float) -> None:
        """From any thread."""
        self._sample_below = ratio * 2.0**64

    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        if client is not None and self._trusts(by_operator):
            span = self.span(name, client, start_s)
        else:
            span = self._begin(name, start_s)
            if span is not None and client is not None:
                span.attributes["tandem.client_trace_id"] = f"{client.trace_id:032x}"
        if span is not None:
            span.is_request = True
        return span

    def _trusts(self, by_operator: bool) -> bool:
        return self._trusted == "all" or (self._trusted == "operators" and by_operator)

    def _begin(self, name: str, start_s: float) -> Span | None:
        """A new trace, if the lot falls on it."""
        trace_id = self._rng.getrandbits(128) or 1
        if trace_id % 2**64 >= self._sample_below:
            return None
        return Span(self, name, TraceContext(trace_id=trace_id, span_id=self._new_id()), None, start_s)

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        if parent is None or not parent.sampled:
            return None
        return self.open(name, parent, self.clock() if start_s is None else start_s)

    def open(self, name: str, parent: TraceContext, start_s: float) -> Span:
        """A child of `parent`, which is sampled."""
        context = TraceContext(trace_id=parent.trace_id, span_id=self._new_id(), state=parent.state)
        return Span(self, name, context, parent.span_id, start_s)

    def _new_id(self) -> int:
        return self._rng.getrandbits(64) or 1
