"""The router's own values: what the doors hand to dispatch, and what dispatch hands back.

A door (HTTP or gRPC) validates and tokenizes a client's request into a `RoutedRequest`; `dispatch` answers with
`ChoiceDelta`s, or raises one of `tandem.errors`. Doors know nothing of workers, dispatch nothing of text. What is made
for every token is a named tuple: a frozen dataclass takes twice as long to make.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.worker_view import WorkerKey
from tandem.telemetry.tracing import Span
from tandem.values.ids import BlockHash, Incarnation, RequestId
from tandem.values.outputs import FinishReason, PhaseTimes, SampledToken
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

MAX_PRIORITY = 2**31 - 1
"""Served last; `-MAX_PRIORITY` is served first."""
_LEAST_CONTINUATIONS = 2
"""A step of a beam search looks at this many for each beam, or at more where many tokens end one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where one choice of a stream is that another router, or an earlier reader of this one, began."""

    worker: Incarnation
    """The decode worker's process that may still have it."""
    num_tokens: int
    """Those that the client has. The stream begins at the first token all the same: text needs those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequest:
    """A request's first tokens are to stay for so long from now on, or until a time that somebody knows."""

    num_tokens: int
    name: str = ""
    """Else it is named after the prefix and its time."""
    ttl_s: float = 0.0
    find_end_s: Callable[[], float | None] | None = None
    """That time on the router's clock, asked for once the prompt is there: until then it may change. None: it is not
    wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What a client wants of a beam search."""

    num_beams: int
    length_penalty: float = 1.0
    """Power of the length that sums are divided by: above 0 longer answers are preferred."""
    early_stopping: bool | Literal["never"] = False
    """True: over when `num_beams` have ended. False: when no running beam would be better if it ended now. "never":
    when none can become better."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a beam."""

    @property
    def num_next(self) -> int:
        """Continuations that a step looks at, of each beam and of all together."""
        return max(_LEAST_CONTINUATIONS, 1 + len(self.end_ids)) * self.num_beams


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A client request after every bound was checked."""

    request_id: RequestId
    """Minted here; a client's X-Request-Id is only echoed."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`max_tokens` is already clamped to the context, `seed` already concrete."""
    grammar_param: str | None = None
    """The client's field that its grammar was made of."""
    hash_root: BlockHash
    """Model, adapter, and the salt of tenant and client: the root of the prompt's block names."""
    tenant: str = ""
    """Whose limits and share it counts for."""
    operation: str = "text_completion"
    """What was asked for, as OpenTelemetry's GenAI conventions name it."""
    num_choices: int = 1
    reads_along: bool = True
    """Tokens are wanted as they come; else the first one at once, the others when some have come together."""
    priority: int = 0
    arrived_s: float | None = None
    """On the router's monotonic clock: when a door had it; None: when dispatch has it."""
    deadline_s: float | None = None
    """On the router's monotonic clock; None: as long as its reader stays."""
    only_worker: WorkerKey | None = None
    """The one worker that may run or read it, of a canary or a probe; clients cannot ask for that."""
    resume: tuple[ResumePoint, ...] = ()
    """Of a stream that is continued, by choice."""
    pins: tuple[PinRequest, ...] = ()
    """Beginnings of its prompt that are to stay cached."""
    resumptions: int = 0
    """How often the stream has been continued."""
    is_local: bool = False
    """It had its turn because a decode worker reads its prompt itself: prefill workers have enough to do."""
    reads: PromptScoringRequest | None = None
    """What is asked of the prompt itself; it is told before any token."""
    beams: BeamSearchParams | None = None
    """The choices are the best of a beam search."""
    span: Span | None = field(default=None, compare=False)
    """Of the whole request, when it is traced; its door ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """The end of one choice."""

    reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose KV was reused, wherever the prefill ran: the true count."""
    times: PhaseTimes
    """Of all its attempts."""
    computed_tokens: int = 0
    """By all its attempts, as far as their workers told."""
    needed_tokens: int = 0
    """What one attempt that nobody disturbs computes: the prompt without what was cached, and the answer."""
    read_by: WorkerRole | None = None
    """The pool whose worker computed the prompt, before the first token; None: not known."""


class ChoiceDelta(NamedTuple):
    """New tokens of one choice, its end, or both. Tokens arrive in order, each exactly once."""

    choice_index: int
    tokens: tuple[SampledToken, ...] = ()
    finish: ChoiceFinish | None = None
    worker: Incarnation = Incarnation(0)
    """The decode worker's process that it came from; 0: from none."""
    reading: ScoredPrompt | None = None
    """Of the prompt, before everything else; of no choice alone."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was reused, with the first tokens of an attempt."""


class DeltaSink(Protocol):
    """Takes a request's deltas where they arrive, without a task in between."""

    def on_delta(self, delta: ChoiceDelta) -> bool:
        """The next delta, without waiting. Raises what ends the request.

        Returns whether nothing more should come before `ready`; what comes meanwhile waits, up to dispatch's bound.
        """
        ...

    async def ready(self) -> None:
        """Return when there is room again. Raises what ends the request."""
        ...


class Streamer(Protocol):
    """Who generates one request for somebody who is no client."""

    def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream all choices, interleaved. Closing the iterator early cancels the request on every worker.

        Raises Overloaded, Unavailable, RequestTooLarge, DeadlineExceeded or InternalError.
        """
        ...


class Generator(Streamer, Protocol):
    """What the doors need of dispatch."""

    def admitted(self, requests: Sequence[RoutedRequest]) -> AbstractContextManager[None]:
        """While inside, all requests of one client call are let in, to be `run`; whoever runs but one need not ask.

        Raises on entering what `run` would raise, or InvalidRequest for more than may ever run: none is in then.
        """
        ...

    async def run(self, request: RoutedRequest, sink: DeltaSink) -> None:
        """Give `sink` all choices, interleaved, until each has finished. Cancelling it cancels the request.

        Raises as `generate`, and what the sink raises.
        """
        ...

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None:
        """Stop generating one choice early (a stop string was seen); its ChoiceFinish still follows, reason STOP."""
        ...
