"""One attempt at one choice, as the decode worker's shell keeps track of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from decode_worker.sent_tokens import ToldTokens
from engine.types.request import Request
from kv_transfer.session.peer import Route
from tandem.telemetry.tracing import Span, TraceContext
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockId, RequestId, TransferId
from tandem.values.outputs import PhaseTimes, SampledToken
from tandem.values.prefix_holder import PrefixHolder
from worker.session_port import SessionPort


class TaskPhase(Enum):
    """Who has the request: which decides how it is ended early."""

    ENGINE = "engine"
    """The scheduler queues or runs it."""
    HANDOFF = "handoff"
    """A prefill worker computes its KV; the engine holds a reservation."""
    REROUTING = "rerouting"
    """The hand-off failed; the router is asked where to go."""
    DONE = "done"


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeTask:
    """Touched by the event loop only; `request` belongs to the engine thread once it is handed over."""

    port: SessionPort
    request_id: RequestId
    """The router's name for the choice."""
    attempt: int
    request: Request
    route: Route | None
    transfer_id: TransferId | None
    holder: PrefixHolder | None
    """Who is thought to hold more of the prompt than whoever computes it."""
    arrived_s: float
    told: ToldTokens
    tokens_per_message: int = 1
    """That may be told together, behind the first."""
    held: list[SampledToken] = field(default_factory=list)
    """The latest tokens, not told to the router yet."""
    phase: TaskPhase = TaskPhase.ENGINE
    reservation: TransferId | None = None
    """The engine's key for the present attempt's reservation: one per hand-off attempt."""
    num_reservations: int = 0
    held_tokens: int = 0
    """Prefix that is here and need not travel: found at first, then with what landed."""
    found_tokens: int = 0
    """Prefix that was here before anybody computed anything for this task."""
    destinations: tuple[BlockId, ...] = ()
    first_token: SampledToken | None = None
    """From a hand-off; authoritative once forwarded."""
    cached_tokens: int | None = None
    """Of the prompt; the first figure that was known stands."""
    fetched_tokens: int = 0
    """Brought from a peer before it was queued here."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    when_done: Callable[[], None] | None = None
    """Called once, when the task leaves the book."""
    started: bool = False
    finish: pb.Finish | None = None
    """What the router was told of the end; None before it, and after an end without an answer."""
    next_index: int = 0
    """In the output, of the next token to tell."""
    decoding_since_s: float = 0.0
    span: Span | None = None
    """From the order to the task's end; None when nobody traces it."""
    awaits_step_since_s: float | None = None
    """When its KV was complete; until the first decode step has ended, and only if traced."""

    @property
    def engine_id(self) -> RequestId:
        """The engine's name for this attempt."""
        return self.request.request_id

    @property
    def trace(self) -> TraceContext | None:
        """For spans of others that belong to this task."""
        return None if self.span is None else self.span.context

    @property
    def is_over(self) -> bool:
        """Whether nobody may be told anything of it any more."""
        return self.phase is TaskPhase.DONE

    def next_reservation(self) -> TransferId:
        """A fresh key: destinations of an earlier attempt may still be in quarantine under theirs."""
        self.num_reservations += 1
        self.reservation = TransferId(f"{self.engine_id}/{self.num_reservations}")
        return self.reservation
