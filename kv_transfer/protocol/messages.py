"""Every message of a hand-off, as values. `wire.py` alone turns them into protobuf and back.

    D -> P   PREFILL  RESERVE  NACK  COMMIT_ACK  ABORT  RENEW
    P -> D   OFFER  REJECT  CHUNK  FIRST_TOKEN  SEAL  DRAINED  ABORT  RENEW

HELLO is exchanged once per link. Payload bytes never travel here (see `transport.py`).
"""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from tandem.errors import ServingError
from tandem.protocol.version_negotiation import VersionRange
from tandem.telemetry.tracing import TraceContext
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, PhaseTimes, SampledToken
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """One attempt of one hand-off; grants and writes belong to exactly one."""

    transfer_id: TransferId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as a value: comparable, and never carrying a traceback."""

    kind: type[ServingError]
    message: str
    retry_after_s: float | None = None

    @classmethod
    def from_error(cls, error: ServingError) -> "Failure":
        """The value of `error`."""
        return cls(kind=type(error), message=error.message, retry_after_s=error.retry_after_s)

    def to_error(self) -> ServingError:
        return self.kind(self.message, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """What the prefill worker is to compute, and which blocks of it to send."""

    transfer_id: TransferId
    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    held_tokens: int
    """Leading tokens whose blocks the decode worker has: whole blocks, fewer than all tokens."""
    sampling: SamplingParams
    hash_root: BlockHash
    choice_index: int = 0
    priority: int = 0
    timeout_s: float | None = None
    """From its receipt on; the prefill worker gives up what takes longer."""
    resume: bool = False
    """What follows `token_ids` is already sampled: compute KV, sample nothing."""
    tail_hash: BlockHash | None = None
    """Name of the last full hash block of `token_ids`, checked at the offer; stays on the decode worker."""

    fetch: bool = False
    """Nothing is computed: what the sender holds of a prefix travels, as whole blocks of both workers."""
    names: tuple[BlockHash, ...] = ()
    """What a fetch has instead of tokens: names of the prefix's hash blocks."""
    holder: PrefixHolder | None = None
    """Who is thought to hold more of the prefix than the prefill worker."""
    trace: TraceContext | None = None
    """Of the span that the work on it belongs to."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, or of the prefix that is fetched."""
        return len(self.names) * HASH_BLOCK_TOKENS if self.fetch else len(self.token_ids)

    def expected_tail(self, num_tokens: int) -> BlockHash | None:
        """Name of the last full hash block of the first `num_tokens`, which are all unless this is a fetch."""
        if not self.fetch:
            return self.tail_hash
        return self.names[num_tokens // HASH_BLOCK_TOKENS - 1]

    def num_blocks(self, block_size: int) -> int:
        """Blocks, or units, of so many tokens that travel: all that hold tokens, less those that are held whole."""
        return -(-self.num_tokens // block_size) - self.held_tokens // block_size

    def num_keepable_blocks(self, block_size: int) -> int:
        """Blocks that may be kept when an attempt fails: whole ones, and never all, for a token must be computed."""
        num_tokens = self.num_tokens if self.fetch else self.num_tokens - 1
        return num_tokens // block_size - self.held_tokens // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """A way to receive KV."""

    name: str
    advert: bytes
    host_id: str
    """Equal where a same-host transport can work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a peer is; the first message on both sides of a link."""

    versions: VersionRange
    """Of the protocol, that it speaks."""
    worker_id: WorkerId
    layout: KVLayout
    transports: tuple[TransportOffer, ...]
    wire_dtype: str = ""
    """What KV travels in: wished by the receiving side, "" for what costs least; chosen by the sending side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """D -> P: compute this and hand it over."""

    job: PrefillJob
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """P -> D: the prompt leaves the queue; bind destinations."""

    num_units: int
    queue_s: float
    tail_hash: BlockHash | None
    """As computed by the prefill worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """D -> P: destinations are bound; `grant` opens them to the named transport."""

    num_units: int
    transport: str
    grant: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Refused: nothing was or will be written."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """P -> D: these cells are in the receiver's memory."""

    seq: int
    rewrite: int
    """How often they were written before."""
    cells: CellRange
    checksum: int
    """CRC-32 over the cells' bytes as sent, in the order of the wire (see kv_transfer/layout/mapping.py)."""
    write_s: float
    """What this write took, by the sender's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """D -> P: that write of that chunk arrived damaged."""

    seq: int
    rewrite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """P -> D: sampled; authoritative from now on."""

    token: SampledToken
    cached_tokens: int
    cached: CachedTokens = NO_CACHED_TOKENS
    """The same, by source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """P -> D: everything is computed; this many chunks make up the hand-off."""

    num_chunks: int
    cached_tokens: int
    times: PhaseTimes
    tail_hash: BlockHash | None
    """The offer's, once more, of what was computed in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAck:
    """D -> P: sources may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Give up this attempt."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """P -> D: the sender has no write of this attempt under way and will start none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Both ways: these hand-offs are alive here."""

    transfer_ids: tuple[TransferId, ...]


Body = (
    Hello | Prefill | Offer | Reserve | Reject | Chunk | Nack | FirstToken | Seal | CommitAck | Abort | Drained | Renew
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnvelope:
    """A message with the names that make it refusable when stale."""

    incarnation: Incarnation
    """Of the sender."""
    addressee: Incarnation
    """Of the process that is meant; 0 in the first HELLO, which asks who is there."""
    key: TransferKey | None
    """None for HELLO, RENEW and a REJECT of the link itself."""
    body: Body
