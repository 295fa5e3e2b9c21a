"""Traces one attempt at a transfer, on either side, from the messages and events that its machine processed.

Chunks are events of the span, not spans: a long prompt has thousands of them (see
`tandem.telemetry.tracing.MAX_EVENTS`). Times are the span's own clock's. The hubs' lease time stands still while the
process does (`kv_transfer.protocol.leases`), so it falls behind what other processes, and other spans of this one, are
timed by.
"""

from typing import Any

from kv_transfer.protocol.events import BlocksBound, Committed, FirstTokenSampled, PrefillFinished, PrefillScheduled
from kv_transfer.protocol.failure_reasons import SILENT, failure_reason
from kv_transfer.protocol.messages import FirstToken, Offer, PrefillJob, Seal, TransferKey
from kv_transfer.session.stats import AttemptOutcome, AttemptTally
from tandem.telemetry.tracing import Span, TraceContext, Tracer


class AttemptTrace:
    """Span of one attempt, ended with its outcome."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._since_s = span.now()
        """Time at which the current wait began."""

    @property
    def context(self) -> TraceContext:
        """Trace context for the spans that this attempt causes elsewhere."""
        return self._span.context

    def record(self, cause: Any) -> None:
        """Record a message or an event that the machine has processed."""
        span = self._span
        now = span.now()
        match cause:
            case Offer():
                self._since_s = now
                span.event("offered", now, queue_s=cause.queue_s)
            case BlocksBound():
                span.interval("tandem.bind", self._since_s, now, **{"tandem.blocks": len(cause.blocks)})
            case PrefillScheduled():
                self._scheduled(cause, now)
            case FirstToken() | FirstTokenSampled():
                span.event("first_token", now)
            case PrefillFinished():
                self._finished(cause, now)
            case Seal():
                span.event("sealed", now, chunks=cause.num_chunks)
            case Committed():
                span.interval("tandem.commit", self._since_s, now)
            case _:
                if (failure := failure_reason(cause)) is not None:
                    span.fail(failure)

    def complete(self) -> None:
        """Record that everything has landed and that the commit begins."""
        self._since_s = self._span.now()

    def chunk(self, seq: int, num_bytes: int, **seconds: float) -> None:
        """Record a chunk that was written or verified."""
        self._span.event("chunk", self._span.now(), seq=seq, bytes=num_bytes, **seconds)

    def damaged(self, seq: int) -> None:
        """Record a chunk that must be written again."""
        self._span.event("damaged_chunk", self._span.now(), seq=seq)

    def ended(self, tally: AttemptTally, transport: str) -> None:
        """End the span with an outcome."""
        outcome, totals, span = tally.outcome, tally.totals, self._span
        span.set_attributes(
            {
                "tandem.transfer.outcome": outcome.value if outcome is not None else "",
                "tandem.transfer.transport": transport,
                "tandem.transfer.bytes": totals.num_bytes,
                "tandem.transfer.seconds": totals.seconds,
                "tandem.transfer.chunks": totals.chunks,
                "tandem.transfer.damaged_chunks": totals.nacks,
            }
        )
        if outcome is AttemptOutcome.EXPIRED:
            span.fail(SILENT)
        span.end()

    def _scheduled(self, event: PrefillScheduled, now: float) -> None:
        if event.num_tokens is not None:
            self._span.event("held", now, tokens=event.num_tokens)
        else:
            self._span.interval("tandem.prefill_queue", now - event.queue_s, now)

    def _finished(self, event: PrefillFinished, now: float) -> None:
        if event.times.prefill_s > 0.0:
            cached = {"tandem.cached_tokens": event.cached_tokens}
            self._span.interval("tandem.prefill", now - event.times.prefill_s, now, **cached)


def begin_trace(tracer: Tracer, name: str, key: TransferKey, job: PrefillJob) -> AttemptTrace | None:
    """Begin the trace of an attempt; None when the job belongs to no trace."""
    span = tracer.span(name, job.trace)
    if span is None:
        return None
    span.set_attributes(
        {
            "tandem.transfer.id": key.transfer_id,
            "tandem.transfer.attempt": key.attempt,
            "tandem.transfer.kind": "fetch" if job.fetch else "handoff",
            "tandem.tokens": job.num_tokens,
            "tandem.held_tokens": job.held_tokens,
        }
    )
    return AttemptTrace(span)
