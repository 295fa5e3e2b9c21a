"""Tracing as the rest of the code sees it: spans, and the context that makes another process's span a child of one.

A trace begins at a server (or continues the client's W3C `traceparent`), and its context travels as one string:
router → decode worker → prefill worker → the peer that a prefix is fetched from. Spans are given times that were
measured anyway. Attributes are counts, names and times, never prompts or tokens.

What is not traced has None instead of a span: that costs one comparison and no memory. The OpenTelemetry SDK is behind
`tandem/telemetry/otel_tracer.py`; nothing here imports it, since pure folders import this module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Attribute = str | bool | int | float | tuple[str, ...]
Trusted = Literal["all", "operators", "none"]
"""Whose `traceparent` decides whether a request is traced, and in which trace."""

MAX_STATE_CHARS = 512
MAX_TEXT_CHARS = 56 + MAX_STATE_CHARS
MAX_EVENTS = 128
"""Of one span: a long prompt may travel in thousands of chunks. Later ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The W3C headers that name a span, as they came. The tracer that continues the trace parses them."""

    traceparent: str
    tracestate: str = ""

    def to_text(self) -> str:
        """`traceparent`, and `tracestate` behind a space when there is one."""
        return f"{self.traceparent} {self.tracestate}" if self.tracestate else self.traceparent


def context_from_text(text: str) -> TraceContext | None:
    """The context that `to_text` wrote, from a peer; None when there is none or it is too long."""
    if len(text) > MAX_TEXT_CHARS:
        return None
    parent, _, state = text.partition(" ")
    return context_from_headers([parent], [state] if state else [])


def context_from_headers(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """The client's context, from all values of `traceparent` and `tracestate`.

    None without exactly one `traceparent`. A `tracestate` that is too long is dropped alone.
    """
    if len(parents) != 1 or not 0 < len(parents[0]) <= MAX_TEXT_CHARS:
        return None
    state = ",".join(states)
    return TraceContext(traceparent=parents[0], tracestate=state if len(state) <= MAX_STATE_CHARS else "")


class Span(Protocol):
    """A span under way. Used by one thread; nothing is exported until it ends. Times are of `now`'s clock."""

    @property
    def context(self) -> TraceContext:
        """For spans of other processes that this one causes."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, as logs and tracing backends write it."""
        ...

    def now(self) -> float:
        """Seconds by the monotonic clock that times all spans of the process."""
        ...

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None: ...

    def child(self, name: str, start_s: float) -> "Span":
        """Begin a span of the same process that this one caused."""
        ...

    def interval(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Record a child that is over."""
        ...

    def event(self, name: str, at_s: float, **attributes: Attribute) -> None:
        """Record one moment; those beyond MAX_EVENTS are only counted."""
        ...

    def fail(self, error: str) -> None:
        """Have the span end in an error; the first one stands."""
        ...

    def end(self, at_s: float | None = None) -> None:
        """End the span, now when no time is given; only the first end counts."""
        ...


class Tracer(Protocol):
    """Begins the spans whose cause lies outside the process: a client's request, an order to a worker."""

    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        """A client's request, which may be in a trace already; None when it is not to be traced.

        `by_operator`: the client has an operator's rights.
        """
        ...

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        """A child of a span that may be another process's, from now when no time is given; None without a parent."""
        ...

    def set_sample_ratio(self, ratio: float | None) -> None:
        """Trace this share of the requests that begin from now on; None: what OTEL_TRACES_SAMPLER says."""
        ...


class NoTracer:
    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        return None

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        return None

    def set_sample_ratio(self, ratio: float | None) -> None:
        """Do nothing: spans have nowhere to go."""
