"""State of one attempt at one choice, as kept by the decode worker outside the engine."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.types.request import Request
from kv_transfer.session.peer import Route
from tandem.adapters.files import Adapter
from tandem.protocol.wire import logprobs_to_pb
from tandem.telemetry.tracing import Span, TraceContext
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockId, RequestId, TransferId
from tandem.values.outputs import NO_PREDICTION_USE, PhaseTimes, PredictionUse, SampledToken
from tandem.values.prefix_holder import PrefixHolder
from worker.session_port import SessionPort


class SentTokens:
    """All tokens of an answer. Four bytes each, and their logprobs only if the request has any."""

    __slots__ = ("_ids", "_measured", "_num_given")

    def __init__(self, given: Sequence[int]) -> None:
        """`given`: output of earlier attempts, which came with the order and so without logprobs."""
        self._ids = array("i", given)
        self._num_given = len(given)
        self._measured: list[SampledToken] = []

    def add(self, token: SampledToken) -> None:
        """Append the next token."""
        self._ids.append(token.token_id)
        if token.logprob is not None:
            self._measured.append(token)

    def can_send_from(self, index: int, *, with_logprobs: bool) -> bool:
        """Whether a client that has the first `index` tokens can get all others."""
        return index <= len(self._ids) and (index >= self._num_given or not with_logprobs)

    def delta(self, request_id: str, attempt: int) -> pb.TokenDelta:
        """All tokens so far, as one message."""
        delta = pb.TokenDelta(request_id=request_id, attempt=attempt, first_index=0, token_ids=self._ids)
        if self._measured:
            nothing = [common.Logprobs()] * self._num_given
            delta.logprobs.extend([*nothing, *(found for t in self._measured if (found := logprobs_to_pb(t)))])
        return delta


class TaskPhase(Enum):
    """Where the request is processed; this determines how it is ended early."""

    ENGINE = "engine"
    """The scheduler queues or runs it."""
    HANDOFF = "handoff"
    """A prefill worker computes its KV; the engine holds a reservation."""
    REROUTING = "rerouting"
    """The hand-off failed; the router has to send another route."""
    DONE = "done"


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeTask:
    """One attempt. Used on the event loop only; `request` belongs to the engine thread once it is handed over."""

    port: SessionPort
    request_id: RequestId
    """The router's id of the choice."""
    attempt: int
    request: Request
    route: Route | None
    """The prefill worker that computes the prompt, the latest of several; None: the prompt is computed here."""
    transfer_id: TransferId | None
    adapter: Adapter | None = None
    """The LoRA adapter that the request names."""
    holder: PrefixHolder | None
    """A worker believed to hold more of the prompt than the worker that computes it."""
    arrived_s: float
    sent: SentTokens
    handle: int = 0
    """The attempt's name in the columns of `StepTokens`; 0: it has none."""
    tokens_per_message: int = 1
    """Maximum number of tokens in one message after the first token."""
    held: list[SampledToken] = field(default_factory=list)
    """The latest tokens, not sent to the router yet."""
    phase: TaskPhase = TaskPhase.ENGINE
    reservation: TransferId | None = None
    """The engine's key of the current hand-off attempt's reservation."""
    num_reservations: int = 0
    held_tokens: int = 0
    """Tokens of the prefix that is here and need not be sent: found at first, then with what landed."""
    found_tokens: int = 0
    """Tokens of the prefix that was here when the task arrived."""
    destinations: tuple[BlockId, ...] = ()
    first_token: SampledToken | None = None
    """First token of a hand-off; authoritative once forwarded."""
    cached_tokens: int | None = None
    """Cached tokens of the prompt; the first known value is kept."""
    fetched_tokens: int = 0
    """Tokens fetched from a peer before the prompt was queued here."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    when_done: list[Callable[[], None]] = field(default_factory=list)
    """Called once each, when the task is removed from the index."""
    prediction: PredictionUse = NO_PREDICTION_USE
    """What has become of the request's prediction, up to the last token that was sent or is held."""
    sent_prediction: PredictionUse = NO_PREDICTION_USE
    """The same as the router knows it."""
    started: bool = False
    finish: pb.Finish | None = None
    """The end as sent to the router; None before it, and after an end without an answer."""
    next_index: int = 0
    """Position in the output of the next token to send."""
    decoding_since_s: float = 0.0
    span: Span | None = None
    """Span from the order to the task's end; None when it is not traced."""
    awaits_step_since_s: float | None = None
    """Time when its KV was complete, until the first decode step has ended; only if traced."""

    @property
    def engine_id(self) -> RequestId:
        """The engine's id of this attempt."""
        return self.request.request_id

    @property
    def trace(self) -> TraceContext | None:
        """Trace context for other spans of this task."""
        return None if self.span is None else self.span.context

    @property
    def is_over(self) -> bool:
        """Whether the task has ended: nothing may be sent about it any more."""
        return self.phase is TaskPhase.DONE

    def next_reservation(self) -> TransferId:
        """Assign a new key: destinations of an earlier attempt may still be in quarantine under theirs."""
        self.num_reservations += 1
        self.reservation = TransferId(f"{self.engine_id}/{self.num_reservations}")
        return self.reservation
