"""Messages between dispatch and one worker's session: orders to the worker, events of one attempt from it."""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from router.types.requests import PlainStream
from router.types.worker_view import WorkerKey
from tandem.adapters.files import Adapter
from tandem.errors import ServingError
from tandem.telemetry.tracing import TraceContext
from tandem.values.cached_chain import CachedChain
from tandem.values.ids import BlockHash, RequestId, TransferId
from tandem.values.outputs import FinishReason, PhaseTimes, PredictionUse, SampledToken
from tandem.values.pooling import PoolingMode
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.prefix_pin import PinKey, PinOrder
from tandem.values.sampling import SamplingParams

CLOSED_HERE = "the router closed the session"


class PrefillRoute(Struct, frozen=True, kw_only=True):
    """The prefill worker that computes the prompt for a decode worker."""

    worker: WorkerKey
    address: str
    """host:port of the prefill worker's hand-off service."""
    transfer_id: TransferId
    attempt: int
    holder: PrefixHolder | None = None
    """A worker expected to hold more of the prompt's prefix."""


class SubmitOrder(Struct, frozen=True, kw_only=True):
    """One attempt at one choice."""

    request_id: RequestId
    """Id of the choice, not of the client's request."""
    attempt: int
    choice_index: int
    prompt_token_ids: "array[int]"
    generated_token_ids: tuple[int, ...]
    """Output of earlier attempts, which is input now and is never sampled again."""
    sampling: SamplingParams
    hash_root: BlockHash
    priority: int
    timeout_s: float | None
    prefill: PrefillRoute | None
    holder: PrefixHolder | None = None
    """Without a route: a worker expected to hold more of the prompt's prefix than the decode worker."""
    tokens_per_message: int = 0
    """Tokens after the first that the worker may send in one message; 0: those of each step at once."""
    trace: TraceContext | None = None
    """Trace context of the parent of the worker's spans."""
    prediction: "array[int] | None" = None
    """The answer that the client expects, as tokens; workers may draft from it."""
    adapter: Adapter | None = None


class AttemptStarted(Struct, frozen=True, kw_only=True):
    """Facts about an attempt that arrive with its first token."""

    cached_tokens: int
    times: PhaseTimes


class AttemptFinished(Struct, frozen=True, kw_only=True):
    """The end of an attempt as its worker reports it; `failure` is set with reason ERROR."""

    reason: FinishReason
    cached_tokens: int
    times: PhaseTimes
    failure: ServingError | None = None


class TokensArrived(Struct, frozen=True):
    """Tokens `first_index`, `first_index + 1`, ... of the output; the end of the attempt, or both."""

    first_index: int
    tokens: tuple[SampledToken, ...]
    started: AttemptStarted | None = None
    finished: AttemptFinished | None = None
    prediction: PredictionUse | None = None
    """What has become of the request's prediction in this attempt so far; None: nothing new."""


class AttemptRefused(Struct, frozen=True, kw_only=True):
    """A worker's refusal of an attempt, of which it keeps nothing."""

    error: ServingError


class TransferFailed(Struct, frozen=True, kw_only=True):
    """The prompt's KV did not arrive; the decode worker keeps what did and waits for a new route."""

    transfer_id: TransferId
    landed_tokens: int
    reason: str
    error: ServingError | None = None
    """The prefill worker's error, when it refused."""


class CommittedHandoff(Struct, frozen=True, kw_only=True):
    """A hand-off that a decode worker reports as complete."""

    prefill: WorkerKey
    """The worker that wrote the KV."""
    num_tokens: int
    """Tokens whose KV was moved."""
    exposed_s: float
    """How long it took after the prompt had been computed."""


class WorkerLost(Struct, frozen=True, kw_only=True):
    """The session ended, and with it all of its attempts."""

    reason: str


class PromptScoringOrder(Struct, frozen=True, kw_only=True):
    """One attempt at scoring one prompt; see `router.types.prompt_logprobs.PromptScoringRequest`."""

    request_id: RequestId
    """Id of the scoring, not of the client's request."""
    attempt: int
    prompt_token_ids: Sequence[int]
    num_top: int | None
    num_next: int | None
    hash_root: BlockHash
    priority: int
    timeout_s: float | None
    pooling: tuple[PoolingMode, ...] = ()
    num_skipped: int = 0
    through_head: bool = False
    label_token_ids: tuple[int, ...] = ()
    adapter: Adapter | None = None


class PromptScoresPart(NamedTuple):
    """A part of a prompt's scores; see `router.types.prompt_logprobs.ScoredPrompt`."""

    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]
    mean: Sequence[float]
    times: PhaseTimes | None
    """Phase times, with the last part."""


class CacheOffer(Struct, frozen=True, kw_only=True):
    """The cached blocks of a draining worker, hottest first, and how long others may fetch them."""

    chains: tuple[CachedChain, ...]
    lends_s: float


class MigrationPlan(Struct, frozen=True, kw_only=True):
    """Blocks that the target of a cache migration may fetch from a draining worker."""

    holder: PrefixHolder
    block_size: int
    """Tokens of each block that the chains name."""
    chains: tuple[CachedChain, ...]
    """Chains of blocks, hottest first."""


AttemptEvent = TokensArrived | AttemptRefused | TransferFailed | WorkerLost


class StreamOffer(Struct, frozen=True, kw_only=True):
    """Lets the session write an attempt's next tokens itself, until anything but such a token arrives. Neither
    function waits nor raises."""

    stream: PlainStream
    next_index: int
    """The next token's position in the output."""
    on_written: Callable[[Sequence[int], Sequence[float]], None]
    """Receives the tokens that were written, and the seconds from one to the next, before anything else happens."""
    write_rest: Callable[[bytes], None]
    """Receives what the client's socket did not take of the last of these tokens."""


def _no_offer(next_index: int) -> None:
    return None


class AttemptReader(NamedTuple):
    """Receives what a worker sends about one attempt, in order. Neither waits nor raises."""

    on_event: Callable[[AttemptEvent], None]
    on_token: Callable[[int, int], None]
    """Receives a token that comes with nothing else, as most do: its position in the output, and its id."""
    offer: Callable[[int], StreamOffer | None] = _no_offer
    """Asks, right after a token, how the session can write the next one, at this position of the output, itself."""


PromptScoringEvent = PromptScoresPart | AttemptRefused | WorkerLost
DeliverScores = Callable[[PromptScoringEvent], None]


class WorkerPort(Protocol):
    """Sends orders to one live worker. No method waits: orders are queued for the session's writer."""

    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None:
        """Start an attempt; its events go to `reader` until it ends or is cancelled.

        Raises Unavailable when the session has ended or its queue is full.
        """
        ...

    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, reader: AttemptReader) -> None:
        """Take over a choice that the worker runs for another router: its tokens from the first arrive, or a refusal.

        `num_shown`: tokens that the client has. Raises Unavailable when the session has ended.
        """
        ...

    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None:
        """Answer a TransferFailed: another prefill worker, or None to compute locally. No-op once ended."""
        ...

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """End an attempt; none of its events is delivered from now on. No-op once ended."""
        ...

    def score_prompt(self, order: PromptScoringOrder, deliver: DeliverScores) -> None:
        """Have a prompt scored; events go to `deliver` until it has ended or is cancelled.

        Raises Unavailable when the session has ended or its queue is full.
        """
        ...

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None:
        """Have the worker fetch a leaving worker's cache where that is cheaper than computing at the given rate."""
        ...

    def end_migration(self) -> None:
        """Inform a leaving worker that no other worker fetches from its cache, or that all have finished."""
        ...

    def pin(self, order: PinOrder) -> None:
        """Pin a prefix; `PinResult` reports the outcome."""
        ...

    def unpin(self, key: PinKey) -> None: ...

    def resync(self) -> None:
        """Request a snapshot of the worker's prefix cache; it arrives like any change of it."""
        ...
