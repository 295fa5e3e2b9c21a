"""The decode worker's messages to routers: one per session and engine step, with the hand-offs that it completed.

Tokens of answers that are not streamed may be held back until a few have come together, so that a router handles one
message instead of many. The first and the last token are sent at once. Several tokens that one step brought a request
are sent as one delta: they come at the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode_worker.phase_times import final
from decode_worker.task import DecodeTask
from kv_transfer.session.peer import Route
from tandem.errors import ServingError
from tandem.protocol.wire import failure_to_pb, finish_reason_to_pb, times_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import NO_PREDICTION_USE, FinishReason, SampledToken
from worker.session_port import SessionPort
from worker.wire import token_delta


@dataclass(slots=True)
class _StepMessage:
    """One session's share of a step."""

    deltas: list[pb.TokenDelta] = field(default_factory=list)
    handoffs: list[pb.CommittedHandoff] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    due: dict[DecodeTask, None] = field(default_factory=dict)
    """Tasks whose held tokens are sent at the end of the step."""
    in_deltas: set[DecodeTask] = field(default_factory=set)
    """Tasks whose further tokens have to follow in `deltas`: a router reads the columns first."""


class StepReports:
    """Collects what one step has to tell each session."""

    def __init__(self, clock: Callable[[], float], *, block_bytes: int) -> None:
        self._clock = clock
        self._block_bytes = block_bytes
        self._messages: dict[SessionPort, _StepMessage] = {}

    def token(self, task: DecodeTask, index: int, token: SampledToken | None, reason: FinishReason | None) -> None:
        """Add a token, an end, or both: a last token and its end are sent together."""
        task.next_index = index + (token is not None)
        if token is not None:
            task.sent.add(token)
            task.held.append(token)
        if task.started and reason is None:
            if len(task.held) >= task.tokens_per_message:
                self._message(task).due[task] = None
            return
        delta = _held(task)
        if not task.started:
            task.started = True
            delta.started.CopyFrom(_started(task))
        if reason is not None:
            task.finish = self._finish(task, reason)
            delta.finish.CopyFrom(task.finish)
        self._add_delta(task, delta)

    def committed(self, task: DecodeTask, sender: Route, *, num_tokens: int, exposed_s: float) -> None:
        """The KV of so many tokens has come from `sender`; sent with the next step's tokens."""
        handoff = pb.CommittedHandoff(
            worker_id=sender.worker_id, incarnation=sender.incarnation, num_tokens=num_tokens, exposed_s=exposed_s
        )
        self._message(task).handoffs.append(handoff)

    def failure(self, task: DecodeTask, error: ServingError) -> None:
        """Add the end of a task that failed before its answer was complete."""
        if task.span is not None:
            task.span.fail(error.message)
        delta = _held(task)
        finish = self._finish(task, FinishReason.ERROR)
        finish.failure.CopyFrom(failure_to_pb(error))
        delta.finish.CopyFrom(finish)
        self._add_delta(task, delta)

    def send(self) -> None:
        """Send what was collected, one message per session."""
        for port, one in self._messages.items():
            for task in one.due:
                if task.held:
                    self._add_held(one, task)
            step = pb.StepTokens(
                deltas=one.deltas,
                handoffs=one.handoffs,
                handles=one.handles,
                indexes=one.indexes,
                token_ids=one.token_ids,
            )
            port.send(pb.WorkerMessage(tokens=step))
        self._messages.clear()

    def _message(self, task: DecodeTask) -> _StepMessage:
        if (message := self._messages.get(task.port)) is None:
            message = self._messages[task.port] = _StepMessage()
        return message

    def _add_delta(self, task: DecodeTask, delta: pb.TokenDelta) -> None:
        message = self._message(task)
        message.deltas.append(delta)
        message.in_deltas.add(task)

    @staticmethod
    def _add_held(message: _StepMessage, task: DecodeTask) -> None:
        """Add the held tokens: to the columns a single one that can be there, else a delta."""
        token = task.held[0]
        fits = task.handle and len(task.held) == 1 and token.logprob is None
        fits = fits and task.prediction is task.sent_prediction
        if fits and task not in message.in_deltas:
            message.handles.append(task.handle)
            message.indexes.append(task.next_index - 1)
            message.token_ids.append(token.token_id)
            task.held.clear()
        else:
            message.deltas.append(_held(task))

    def _finish(self, task: DecodeTask, reason: FinishReason) -> pb.Finish:
        times = times_to_pb(final(task, self._clock(), block_bytes=self._block_bytes))
        return pb.Finish(reason=finish_reason_to_pb(reason), cached_tokens=task.cached_tokens or 0, times=times)


def send_all(task: DecodeTask) -> None:
    """Send the answer so far to a router that has just taken it over."""
    delta = task.sent.delta(task.request_id, task.attempt)
    task.held.clear()
    if task.prediction is not NO_PREDICTION_USE:
        _add_prediction(task, delta)
    if task.started:
        delta.started.CopyFrom(_started(task))
    if task.finish is not None:
        delta.finish.CopyFrom(task.finish)
    task.port.send(pb.WorkerMessage(tokens=pb.StepTokens(deltas=[delta])))


def _held(task: DecodeTask) -> pb.TokenDelta:
    """The held tokens as a delta; they count as sent from now on."""
    first_index = task.next_index - len(task.held)
    delta = token_delta(task.request_id, task.attempt, first_index, task.held)
    task.held.clear()
    if task.prediction is not task.sent_prediction:
        _add_prediction(task, delta)
    return delta


def _add_prediction(task: DecodeTask, delta: pb.TokenDelta) -> None:
    accepted, rejected = task.sent_prediction = task.prediction
    delta.prediction.CopyFrom(pb.PredictionUse(accepted=accepted, rejected=rejected))


def _started(task: DecodeTask) -> pb.Started:
    return pb.Started(cached_tokens=task.cached_tokens or 0, times=times_to_pb(task.times))


def refuse(task: DecodeTask, error: ServingError) -> None:
    """Refuse a task, of which nothing remains here."""
    refuse_order(task.port, task.request_id, task.attempt, error)


def refuse_order(port: SessionPort, request_id: str, attempt: int, error: ServingError) -> None:
    """Refuse an order for which there is no task."""
    refused = pb.Refused(request_id=request_id, attempt=attempt, failure=failure_to_pb(error))
    port.send(pb.WorkerMessage(refused=refused))


def ask_for_route(task: DecodeTask, error: ServingError) -> None:
    """Report a failed hand-off, so that the router chooses who computes what is missing."""
    failed = pb.TransferFailed(
        request_id=task.request_id,
        attempt=task.attempt,
        transfer_id=task.transfer_id or "",
        landed_tokens=task.held_tokens,
        reason=error.message,
        failure=failure_to_pb(error),
    )
    task.port.send(pb.WorkerMessage(transfer_failed=failed))
