"""The values that servers pass to dispatch, and that dispatch returns.

A server (HTTP or gRPC) validates and tokenizes a client's request into a `RoutedRequest`; `dispatch` answers with
`ChoiceDelta`s, or raises one of `tandem.errors`. Servers know nothing of workers, and dispatch nothing of text. Values
made for every request or token are msgspec's structs: a frozen dataclass takes many times as long to make (ADR 26).
"""

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from msgspec import Struct

from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.worker_view import WorkerKey
from tandem.adapters.files import Adapter
from tandem.telemetry.tracing import Span
from tandem.values.ids import BlockHash, Incarnation, RequestId
from tandem.values.outputs import NO_PREDICTION_USE, FinishReason, PhaseTimes, PredictionUse, SampledToken, bare_token
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

MAX_PRIORITY = 2**31 - 1
"""The lowest priority; `-MAX_PRIORITY` is the highest."""
_LEAST_CONTINUATIONS = 2
"""Continuations that a step of a beam search considers per beam; more where many tokens end one."""


class ResumePoint(Struct, frozen=True, kw_only=True):
    """The position in one choice of a stream that another router, or an earlier reader of this one, began."""

    worker: Incarnation
    """Incarnation of the decode worker that may still run it."""
    num_tokens: int
    """Tokens that the client has. The stream still begins at the first token: text needs those before it."""


class PinRequest(Struct, frozen=True, kw_only=True):
    """A request to pin a prompt's first tokens, for a TTL or until a time that a callback gives."""

    num_tokens: int
    name: str = ""
    """Name of the pin; empty: named after the prefix and its TTL."""
    ttl_s: float = 0.0
    find_end_s: Callable[[], float | None] | None = None
    """Returns when the pin ends, on the router's clock; called once the prompt is computed, since it may change until
    then. None: the pin is no longer wanted."""


class BeamSearchParams(Struct, frozen=True, kw_only=True):
    """Parameters of a beam search."""

    num_beams: int
    length_penalty: float = 1.0
    """Exponent of the length by which sums are divided: values above 0 prefer longer answers."""
    early_stopping: bool | Literal["never"] = False
    """True: stop when `num_beams` have ended. False: when no running beam would be better if it ended now. "never":
    when none can become better."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a beam."""

    @property
    def num_next(self) -> int:
        """Continuations that a step considers, for each beam and for all together."""
        return max(_LEAST_CONTINUATIONS, 1 + len(self.end_ids)) * self.num_beams


class RoutedRequest(Struct, frozen=True, kw_only=True):
    """A client request that has passed validation."""

    request_id: RequestId
    """Id made by this router; a client's X-Request-Id is only echoed."""
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    """Sampling parameters, with `max_tokens` clamped to the context and `seed` chosen."""
    prediction: "array[int] | None" = None
    """The answer that the client expects, as tokens. Only its speed depends on it."""
    grammar_param: str | None = None
    """The client's field that the grammar was made from."""
    hash_root: BlockHash
    """Hash of model, adapter, and the salts of tenant and client: the root of the prompt's block names."""
    tenant: str = ""
    """The tenant whose limits and fair share it counts against."""
    operation: str = "text_completion"
    """The operation, as OpenTelemetry's GenAI conventions name it."""
    num_choices: int = 1
    reads_along: bool = True
    """Whether tokens are wanted as they come; otherwise the first one at once, later ones in groups."""
    priority: int = 0
    arrived_s: float | None = None
    """Time at which a server received it, on the router's monotonic clock; None: when dispatch did."""
    deadline_s: float | None = None
    """Deadline on the router's monotonic clock; None: none."""
    only_worker: WorkerKey | None = None
    """The one worker that may run it, for a canary or a probe; clients cannot set this."""
    resume: tuple[ResumePoint, ...] = ()
    """Positions of a stream that is continued, by choice."""
    pins: tuple[PinRequest, ...] = ()
    """Prefixes of its prompt to pin."""
    resumptions: int = 0
    """Number of times that the stream has been continued."""
    is_local: bool = False
    """Whether it had its turn because a decode worker prefills it itself while prefill workers are busy."""
    scoring: PromptScoringRequest | None = None
    """Scores requested for the prompt itself; returned before any token."""
    beams: BeamSearchParams | None = None
    """Parameters of a beam search, whose best beams are the choices; None: sampling."""
    adapter: Adapter | None = None
    """The LoRA adapter that the client named as its model; None: the model itself."""
    span: Span | None = None
    """The span of the whole request, when it is traced; its server ends it."""


class ChoiceFinish(Struct, frozen=True, kw_only=True):
    """The end of one choice."""

    reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose KV was reused, wherever the prefill ran, as measured."""
    times: PhaseTimes
    """Phase times, summed over all its attempts."""
    computed_tokens: int = 0
    """Tokens computed by all its attempts, as far as their workers reported."""
    needed_tokens: int = 0
    """Tokens that one undisturbed attempt computes: the prompt without its cached part, and the answer."""
    prediction: PredictionUse = NO_PREDICTION_USE
    """What became of the request's prediction, summed over all its attempts."""
    prefilled_by: WorkerRole | None = None
    """The pool whose worker computed the prompt, before the first token; None: unknown."""


class ChoiceDelta(Struct, frozen=True):
    """New tokens of one choice, its end, or both. Tokens arrive in order, each exactly once."""

    choice_index: int
    tokens: tuple[SampledToken, ...] = ()
    finish: ChoiceFinish | None = None
    worker: Incarnation = Incarnation(0)
    """Incarnation of the decode worker that it came from; 0: none."""
    scored: ScoredPrompt | None = None
    """Scores of the prompt, before everything else; they belong to no single choice."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was reused, with the first tokens of an attempt."""


class JsonTable(Protocol):
    """The texts of a vocabulary, escaped for JSON, in one piece of memory; empty where they depend on other tokens."""

    text: bytes
    offsets: "array[int]"
    """Where each token's text begins, and at last where the last one ends."""


class PlainEvents(Struct, frozen=True):
    """Where the events of a choice's next tokens go, which differ in their text alone, and what surrounds that."""

    descriptor: int
    """The client's socket. All that was written to it before has been sent."""
    write_rest: Callable[[bytes], bool]
    """Writes what the socket did not take; returns whether the client has to read before more is written."""
    before: bytes
    """The beginning of each event, up to the content of a JSON string."""
    after: bytes


class PlainStream(Struct, frozen=True):
    """A stream whose next tokens may be written to its client by native code (`router.fleet.native_streams`)."""

    events: PlainEvents
    texts: JsonTable
    stop_ids: frozenset[int]
    """Tokens that may end the stream: they are not written."""
    last_s: float
    """When its last token arrived, on `time.monotonic`."""


class DeltaSink(Protocol):
    """Receives a request's deltas as they arrive, without a task in between."""

    def on_delta(self, delta: ChoiceDelta) -> bool:
        """Handle the next delta without waiting. Raises an error to end the request.

        Returns whether to wait for `ready` before sending more; what arrives meanwhile waits, up to dispatch's bound.
        """
        ...

    def on_token(self, choice_index: int, token_id: int) -> bool:
        """Handle a token that comes with nothing else, from the worker of its choice's last delta; as `on_delta`."""
        return self.on_delta(ChoiceDelta(choice_index, (bare_token(token_id),)))

    def plain_stream(self, choice_index: int) -> PlainStream | None:
        """Return what it takes to write the next tokens of a choice elsewhere; None where they have to come here."""
        return None

    def on_written(self, choice_index: int, gaps_s: Sequence[float]) -> None:
        """Count tokens of a `plain_stream` that were written elsewhere, each so many seconds after the one before."""
        return

    async def ready(self) -> None:
        """Wait until there is room again. Raises the error that ends the request."""
        ...


class TokenAccount(Protocol):
    """Counts what a request's client receives, before it does."""

    def on_delta(self, delta: ChoiceDelta) -> None: ...

    def on_token(self, count: int = 1) -> None:
        """Count tokens that come with nothing else."""
        ...


class Streamer(Protocol):
    """Generates one request for a caller in the router, such as a canary."""

    def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream all choices, interleaved. Closing the iterator early cancels the request on every worker.

        Raises Overloaded, Unavailable, RequestTooLarge, DeadlineExceeded or InternalError.
        """
        ...


class Generator(Streamer, Protocol):
    """The part of dispatch that servers use."""

    def admitted(self, requests: Sequence[RoutedRequest]) -> AbstractContextManager[None]:
        """Admit all requests of one client call while inside, to be `run`; not needed for a single request.

        On entering, raises what `run` would raise, or InvalidRequest for more than may ever run; none is admitted then.
        """
        ...

    async def run(self, request: RoutedRequest, sink: DeltaSink) -> None:
        """Send all choices to `sink`, interleaved, until each has finished. Cancelling it cancels the request.

        Raises as `generate`, and what the sink raises.
        """
        ...

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None:
        """Stop generating one choice early (a stop string was found); its ChoiceFinish still follows, with reason
        STOP."""
        ...
