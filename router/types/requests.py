"""The router's own values: what the servers pass to dispatch, and what dispatch returns.

A server (HTTP or gRPC) validates and tokenizes a client's request into a `RoutedRequest`; `dispatch` answers with
`ChoiceDelta`s, or raises one of `tandem.errors`. Servers know nothing of workers, dispatch nothing of text. Values made
for every token are named tuples: a frozen dataclass takes twice as long to make.
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
    """A request to pin a prompt's first tokens, for a TTL or until a time that a callback gives."""

    num_tokens: int
    name: str = ""
    """Empty: named after the prefix and its TTL."""
    ttl_s: float = 0.0
    find_end_s: Callable[[], float | None] | None = None
    """Returns that time on the router's clock, called once the prompt is computed: until then it may change. None: the
    pin is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search."""

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
    """The tenant whose limits and fair share it counts against."""
    operation: str = "text_completion"
    """The operation, as OpenTelemetry's GenAI conventions name it."""
    num_choices: int = 1
    reads_along: bool = True
    """Tokens are wanted as they come; else the first one at once, the others when some have come together."""
    priority: int = 0
    arrived_s: float | None = None
    """When a server received it, on the router's monotonic clock; None: when dispatch did."""
    deadline_s: float | None = None
    """On the router's monotonic clock; None: as long as its reader stays."""
    only_worker: WorkerKey | None = None
    """The one worker that may run it, for a canary or a probe; clients cannot set this."""
    resume: tuple[ResumePoint, ...] = ()
    """Of a stream that is continued, by choice."""
    pins: tuple[PinRequest, ...] = ()
    """Prefixes of its prompt to pin."""
    resumptions: int = 0
    """How often the stream has been continued."""
    is_local: bool = False
    """It had its turn because a decode worker reads its prompt itself: prefill workers have enough to do."""
    reads: PromptScoringRequest | None = None
    """The log probabilities requested for the prompt itself; returned before any token."""
    beams: BeamSearchParams | None = None
    """The choices are the best of a beam search."""
    span: Span | None = field(default=None, compare=False)
    """The span of the whole request, when it is traced; its server ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """The end of one choice."""

    reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose KV was reused, wherever the prefill ran: the true count."""
    times: PhaseTimes
    """Of all its attempts."""
    computed_tokens: int = 0
    """Tokens computed by all its attempts, as far as their workers reported."""
    needed_tokens: int = 0
    """Tokens that one undisturbed attempt computes: the prompt without its cached part, and the answer."""
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
    """Receives a request's deltas where they arrive, without a task in between."""

    def on_delta(self, delta: ChoiceDelta) -> bool:
        """The next delta, without waiting. Raises what ends the request.

        Returns whether nothing more should come before `ready`; what comes meanwhile waits, up to dispatch's bound.
        """
        ...

    async def ready(self) -> None:
        """Wait until there is room again. Raises the error that ends the request."""
        ...


class Streamer(Protocol):
    """Generates one request for a caller in the router, such as a canary."""

    def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream all choices, interleaved. Closing the iterator early cancels the request on every worker.

        Raises Overloaded, Unavailable, RequestTooLarge, DeadlineExceeded or InternalError.
        """
        ...


class Generator(Streamer, Protocol):
    """What the servers need of dispatch."""

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
