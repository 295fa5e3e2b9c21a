"""A tracer whose spans a test can look at."""

from random import Random
from typing import Any

from tandem.telemetry.tracing import EndedSpan, RecordingTracer, TraceContext

CLIENT = TraceContext(trace_id=0xABC, span_id=0xDEF)


class Kept:
    """A SpanSink that keeps everything."""

    def __init__(self) -> None:
        self.spans: list[EndedSpan] = []

    def take(self, span: EndedSpan) -> None:
        self.spans.append(span)

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)

    def one(self, name: str) -> EndedSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def parent_of(self, name: str) -> str:
        """The name of a span's parent."""
        parent_id = self.one(name).parent_id
        [parent] = [span for span in self.spans if span.context.span_id == parent_id]
        return parent.name


def keeping(seed: int = 1, **settings: Any) -> tuple[RecordingTracer, Kept]:
    """Tracers of several processes must have different seeds, or their spans have the same ids."""
    kept = Kept()
    return RecordingTracer(kept, rng=Random(seed), **settings), kept
