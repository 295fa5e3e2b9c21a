"""Spans that the decode worker adds to a request's trace; the functions do nothing for untraced tasks."""

from decode_worker.task import DecodeTask
from tandem.errors import ServingError
from tandem.telemetry.tracing import Span, Tracer, context_from_text
from tandem.v1 import session_pb2 as pb


def begin_span(tracer: Tracer, submit: pb.Submit, now_s: float, *, num_prompt_tokens: int) -> Span | None:
    """Begin the span of one order. A malformed context is ignored: it is never a reason to refuse work."""
    parent = context_from_text(submit.trace) if submit.HasField("trace") else None
    span = tracer.span("tandem.decode", parent, now_s)
    if span is not None:
        span.set_attributes(
            {
                "tandem.request.id": submit.request_id,
                "tandem.attempt": submit.attempt,
                "tandem.choice": submit.choice_index,
                "tandem.prompt_tokens": num_prompt_tokens,
                "tandem.resumed_tokens": len(submit.generated_token_ids),
            }
        )
    return span


def trace_own_prefill(task: DecodeTask, now_s: float) -> None:
    """Record that the prompt was computed here, and its first token with it."""
    if task.span is None:
        return
    computed_from_s = now_s - task.times.prefill_s
    task.span.interval("tandem.prefill_queue", computed_from_s - task.times.prefill_queue_s, computed_from_s)
    task.span.interval("tandem.prefill", computed_from_s, now_s, **{"tandem.cached_tokens": task.cached_tokens or 0})
    task.span.event("first_token", now_s)
    task.awaits_step_since_s = now_s


def trace_first_step(task: DecodeTask, now_s: float) -> None:
    """Record the first token decoded here after the KV had arrived."""
    if task.span is not None and task.awaits_step_since_s is not None:
        task.span.interval("tandem.first_decode_step", task.awaits_step_since_s, now_s)
    task.awaits_step_since_s = None


def end_span(task: DecodeTask, error: ServingError | None) -> None:
    """End the task's span."""
    if task.span is None:
        return
    if error is not None:
        task.span.fail(error.message)
    task.span.set_attributes({"tandem.cached_tokens": task.cached_tokens or 0, "tandem.output_tokens": task.next_index})
    task.span.end()
    task.span = None
