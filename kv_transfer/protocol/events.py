"""Events on a worker that concern a hand-off: answers to actions, and news from its engine or link."""

from dataclasses import dataclass

from kv_transfer.protocol.messages import Failure, FirstToken
from tandem.values.ids import BlockHash, BlockId
from tandem.values.outputs import PhaseTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksBound:
    """Destinations after the held prefix, in order."""

    blocks: tuple[BlockId, ...]
    windows: tuple[tuple[BlockId, ...], ...] = ()
    """Those of each group of windowed layers, where these have blocks of their own; NO_BLOCK before the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRefused:
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantOpened:
    """A lane may be written: the answer to OpenGrant, once for each."""

    transport: str
    grant: bytes
    drain_proves_quiet: bool
    """Whether all bytes sent over this transport have landed once the sender reports DRAINED."""
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    seq: int
    rewrite: int
    intact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Proof that no byte of this attempt can land through a lane any more."""

    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The blocks belong to the request: the answer to Commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCancelled:
    """The hand-off is no longer wanted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The peer is unreachable, has ended, or is another process than the one addressed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFaulted:
    """The peer sent a message that is malformed or out of bounds."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The engine has queued the prefill: the answer to SubmitPrefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRefused:
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillScheduled:
    """The prompt left the engine's queue."""

    queue_s: float
    tail_hash: BlockHash | None
    """Name of the last full hash block that will be sent, as the engine computed it."""
    num_tokens: int | None = None
    """Number of tokens held here, for a fetch; None for a prefill, which will compute all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVComputed:
    """KV of the first `num_computed_tokens` tokens is in `blocks` (the whole table, held prefix included).

    While a step is running that brings this to `coming_tokens` tokens, the first `num_layers` layers of the additional
    tokens are in the blocks too.
    """

    num_computed_tokens: int
    blocks: tuple[BlockId, ...]
    windows: tuple[tuple[BlockId, ...], ...] = ()
    """The blocks of each group of windowed layers, where these have their own; before the prompt's window they mean
    nothing."""
    coming_tokens: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampled:
    """The engine sampled the first output token."""

    first_token: FirstToken


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    cached_tokens: int
    times: PhaseTimes
    tail_hash: BlockHash | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailed:
    """The engine gave the request up."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Answer to StartWrite: the bytes are in the remote memory."""

    seq: int
    rewrite: int
    checksum: int
    seconds: float
    """Duration of the write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    seq: int
    rewrite: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesQuiet:
    """No write moves a byte any more: the answer to CancelWrites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesEnding:
    """Answer to CancelWrites: no write begins any more; each one in flight is reported as it ends."""


ReceiverEvent = (
    BlocksBound | BindRefused | GrantOpened | Verified | Quiet | Committed | HandoffCancelled | LinkLost | PeerFaulted
)
SenderEvent = (
    Submitted
    | SubmitRefused
    | PrefillScheduled
    | KVComputed
    | FirstTokenSampled
    | PrefillFinished
    | PrefillFailed
    | Written
    | WriteFailed
    | WritesQuiet
    | WritesEnding
    | HandoffCancelled
    | LinkLost
    | PeerFaulted
)
