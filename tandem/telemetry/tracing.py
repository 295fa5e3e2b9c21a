"""Interface to tracing: spans, and the context that makes another process's span a child of one.

A trace begins at a server (or continues the client's W3C `traceparent`), and its context travels as one string: router
→ decode worker → prefill worker → the peer that a prefix is fetched from. Spans are given times that were measured
anyway. Attributes are counts, names and times, never prompts or tokens.

Untraced work has None instead of a span: that costs one comparison and no memory. The OpenTelemetry SDK is behind
`tandem/telemetry/otel_tracer.py`; nothing here imports it, because pure folders import this module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Attribute = str | bool | int | float | tuple[str, ...]
Trusted = Literal["all", "operators", "none"]
"""Clients whose `traceparent` decides whether a request is traced, and in which trace."""

MAX_STATE_CHARS = 512
MAX_TEXT_CHARS = 56 + MAX_STATE_CHARS
MAX_EVENTS = 128
"""Maximum number of events of a span, since a long prompt may travel in thousands of chunks; later ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The W3C headers that name a span, unparsed; the tracer that continues the trace parses them."""

    traceparent: str
    tracestate: str = ""

    def to_text(self) -> str:
        """`traceparent`, followed by a space and `tracestate` if there is one."""
        return f"{self.traceparent} {self.tracestate}" if self.tracestate else self.traceparent


def context_from_text(text: str) -> TraceContext | None:
    """Parse the text of a peer's `to_text`; None when it is empty or too long."""
    if len(text) > MAX_TEXT_CHARS:
        return None
    parent, _, state = text.partition(" ")
    return context_from_headers([parent], [state] if state else [])


def context_from_headers(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """The client's context, from all values of `traceparent` and `tracestate`.

    None without exactly one `traceparent`. An oversized `tracestate` alone is dropped.
    """
    if len(parents) != 1 or not 0 < len(parents[0]) <= MAX_TEXT_CHARS:
        return None
    state = ",".join(states)
    return TraceContext(traceparent=parents[0], tracestate=state if len(state) <= MAX_STATE_CHARS else "")


class Span(Protocol):
    """A span that has begun. Used by one thread; nothing is exported until it ends. Times are on the clock of `now`."""

    @property
    def context(self) -> TraceContext:
        """Trace context for spans in other processes that this one causes."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, as in logs and tracing backends."""
        ...

    def now(self) -> float:
        """Seconds by the monotonic clock that times all spans of the process."""
        ...

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None: ...

    def child(self, name: str, start_s: float) -> "Span":
        """Begin a span of the same process that this one caused."""
        ...

    def interval(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Record a child that has ended."""
        ...

    def event(self, name: str, at_s: float, **attributes: Attribute) -> None:
        """Record one moment; those beyond MAX_EVENTS are only counted."""
        ...

    def fail(self, error: str) -> None:
        """Mark the span as failed; the first error is kept."""
        ...

    def end(self, at_s: float | None = None) -> None:
        """End the span, now when no time is given; only the first end counts."""
        ...


class Tracer(Protocol):
    """Begins the spans whose cause is outside the process: a client's request, an order to a worker."""

    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        """Begin the span of a client's request, which may be in a trace already; None when it is not traced.

        `by_operator`: the client has an operator's rights.
        """
        ...

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        """Begin a child of a span, possibly another process's, now when no time is given; None without a parent."""
        ...

    def set_sample_ratio(self, ratio: float | None) -> None:
        """Trace this share of new requests; None: decided by OTEL_TRACES_SAMPLER."""
        ...


class NoTracer:
    def request(
        self, name: str, client: TraceContext | None, start_s: float, *, by_operator: bool = False
    ) -> Span | None:
        return None

    def span(self, name: str, parent: TraceContext | None, start_s: float | None = None) -> Span | None:
        return None

    def set_sample_ratio(self, ratio: float | None) -> None:
        """Do nothing: no spans are recorded."""
