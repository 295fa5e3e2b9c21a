"""What passes between dispatch and one worker's session: orders down, events of one attempt up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from router.types.worker_view import WorkerKey
from tandem.errors import ServingError
from tandem.telemetry.tracing import TraceContext
from tandem.values.cached_chain import CachedChain
from tandem.values.ids import BlockHash, RequestId, TransferId
from tandem.values.outputs import FinishReason, PhaseTimes, SampledToken
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.prefix_pin import PinKey, PinOrder
from tandem.values.sampling import SamplingParams

CLOSED_HERE = "the router closed the session"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRoute:
    """The prefill worker that computes a decode worker's prompt."""

    worker: WorkerKey
    address: str
    """host:port of the prefill worker's hand-off service."""
    transfer_id: TransferId
    attempt: int
    holder: PrefixHolder | None = None
    """A worker expected to hold more of the prompt's prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOrder:
    """One attempt at one choice."""

    request_id: RequestId
    """Of the choice, not of the client's request."""
    attempt: int
    choice_index: int
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]
    """Output of earlier attempts: input now, never sampled again."""
    sampling: SamplingParams
    hash_root: BlockHash
    priority: int
    timeout_s: float | None
    prefill: PrefillRoute | None
    holder: PrefixHolder | None = None
    """Without a route: a worker expected to hold more of the prompt's prefix than the decode worker."""
    tokens_per_message: int = 0
    """Tokens after the first that the worker may send in one message; 0: each step's at once."""
    trace: TraceContext | None = None
    """Of the span that the worker's spans are children of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """The facts about an attempt that come with its first token."""

    cached_tokens: int
    times: PhaseTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinished:
    """The end of an attempt, as its worker reports it; `failure` with reason ERROR."""

    reason: FinishReason
    cached_tokens: int
    times: PhaseTimes
    failure: ServingError | None = None


class TokensArrived(NamedTuple):
    """Tokens `first_index`, `first_index + 1`, ... of the output; the end, or both."""

    first_index: int
    tokens: tuple[SampledToken, ...]
    started: AttemptStarted | None = None
    finished: AttemptFinished | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Known with the first of them."""
        return None if self.started is None else self.started.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRefused:
    """The worker refuses the attempt, and keeps nothing of it."""

    error: ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """The prompt's KV did not arrive; the decode worker holds what did and waits for a new route."""

    transfer_id: TransferId
    landed_tokens: int
    reason: str
    error: ServingError | None = None
    """The prefill worker's error, when it refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The session ended, and with it all of its attempts."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoringOrder:
    """One attempt at reading one prompt; see `router.types.prompt_logprobs.PromptScoringRequest`."""

    request_id: RequestId
    """Of the scoring, not of the client's request."""
    attempt: int
    prompt_token_ids: tuple[int, ...]
    num_top: int | None
    num_next: int | None
    hash_root: BlockHash
    priority: int
    timeout_s: float | None


class PromptScoresPart(NamedTuple):
    """More of what was read of a prompt; see `router.types.prompt_logprobs.ScoredPrompt`."""

    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]
    mean: Sequence[float]
    times: PhaseTimes | None
    """With the last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOffer:
    """What a draining worker has cached, hottest first, and for how long others may fetch it."""

    chains: tuple[CachedChain, ...]
    lends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What the target of a cache migration may fetch of a draining worker."""

    holder: PrefixHolder
    block_size: int
    """Tokens of each block that the chains name."""
    chains: tuple[CachedChain, ...]
    """Hottest first."""


AttemptEvent = TokensArrived | AttemptRefused | TransferFailed | WorkerLost
Deliver = Callable[[AttemptEvent], None]
PromptScoringEvent = PromptScoresPart | AttemptRefused | WorkerLost
DeliverScores = Callable[[PromptScoringEvent], None]


class WorkerPort(Protocol):
    """Sends orders to one live worker. Nothing here waits: orders are queued for the session's writer."""

    def submit(self, order: SubmitOrder, deliver: Deliver) -> None:
        """Start an attempt; its events go to `deliver` until it ends or is cancelled.

        Raises Unavailable when the session has ended or its queue is full.
        """
        ...

    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, deliver: Deliver) -> None:
        """Take over a choice that the worker runs for another router: its tokens from the first come, or a refusal.

        `num_shown`: tokens that the client has. Raises Unavailable when the session has ended.
        """
        ...

    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None:
        """Answer a TransferFailed: another prefill worker, or None to compute locally. No-op once ended."""
        ...

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """End an attempt; no event of it is delivered from now on. No-op once ended."""
        ...

    def read(self, order: PromptScoringOrder, deliver: DeliverScores) -> None:
        """Have a prompt scored; its events go to `deliver` until it has ended or is cancelled.

        Raises Unavailable when the session has ended or its queue is full.
        """
        ...

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None:
        """Have the worker fetch a leaving worker's cache, where that is cheaper than computing at that rate."""
        ...

    def end_migration(self) -> None:
        """Tell a leaving worker that nobody fetches any of its cache, any more or at all."""
        ...

    def pin(self, order: PinOrder) -> None:
        """Pin a prefix; `PinResult` reports the outcome."""
        ...

    def unpin(self, key: PinKey) -> None: ...

    def resync(self) -> None:
        """Request a snapshot of the worker's prefix cache; it arrives like any change of it."""
        ...
