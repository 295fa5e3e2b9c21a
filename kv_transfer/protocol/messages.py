"""Every message of a hand-off, as values; `wire.py` converts them to protobuf and back.

D -> P   PREFILL  RESERVE  NACK  COMMIT_ACK  ABORT  RENEW
P -> D   OFFER  REJECT  CHUNK  FIRST_TOKEN  SEAL  DRAINED  ABORT  RENEW

D is the decode worker, P the prefill worker. HELLO is exchanged once per link. KV bytes travel through a transport,
never in these messages.
"""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from tandem.adapters.files import Adapter
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
    """One attempt of one hand-off, or one lane of it; grants and writes belong to exactly one."""

    transfer_id: TransferId
    attempt: int
    lane: int = 0
    """Lane of a grant or a write; 0 in messages, which belong to the whole attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A ServingError as a value: comparable, without a traceback."""

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
    """The tokens that the prefill worker is to compute, and which blocks of them to send."""

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
    """Time limit from receipt on, after which the prefill worker gives up."""
    resume: bool = False
    """Whether the token after `token_ids` is already sampled: compute KV only, sample nothing."""
    tail_hash: BlockHash | None = None
    """Name of the last full hash block of `token_ids`, checked at the offer; stays on the decode worker."""

    fetch: bool = False
    """Whether this is a fetch: the sender computes nothing and sends the part of the prefix it holds, in whole blocks
    of both workers."""
    names: tuple[BlockHash, ...] = ()
    """Names of the prefix's hash blocks; a fetch has these instead of tokens."""
    holder: PrefixHolder | None = None
    """Worker believed to hold more of the prefix than the prefill worker."""
    adapter: Adapter | None = None
    """LoRA adapter that the prompt is computed with. A fetch needs none: names of blocks stand for it, too."""
    trace: TraceContext | None = None
    """Trace context of the span that the work belongs to."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, or of the prefix that is fetched."""
        return len(self.names) * HASH_BLOCK_TOKENS if self.fetch else len(self.token_ids)

    def expected_tail(self, num_tokens: int) -> BlockHash | None:
        """Name of the last full hash block of the first `num_tokens`, which are all unless this is a fetch."""
        if not self.fetch:
            return self.tail_hash
        return self.names[num_tokens // HASH_BLOCK_TOKENS - 1]

    def num_blocks(self, block_size: int) -> int:
        """Blocks or units of `block_size` tokens to transfer: those that hold tokens, less those held whole."""
        return -(-self.num_tokens // block_size) - self.held_tokens // block_size

    def num_keepable_blocks(self, block_size: int) -> int:
        """Blocks to keep when an attempt fails: whole ones, and never all, since one token must be computed."""
        num_tokens = self.num_tokens if self.fetch else self.num_tokens - 1
        return num_tokens // block_size - self.held_tokens // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """A way to receive KV."""

    name: str
    advert: bytes
    host_id: str
    """Identifies the host; a same-host transport needs equal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Identifies a peer; the first message on both sides of a link."""

    versions: VersionRange
    """Protocol versions that the peer supports."""
    worker_id: WorkerId
    layout: KVLayout
    transports: tuple[TransportOffer, ...]
    """Receiver: those of its first region. Sender: the one that it has connected, of each lane."""
    wire_dtype: str = ""
    """Dtype of KV on the wire: requested by the receiver, "" for the cheapest; chosen by the sender."""
    more_regions: tuple[tuple[TransportOffer, ...], ...] = ()
    """Receiver of several regions: the transports of each but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """D -> P: compute this prompt and hand it over."""

    job: PrefillJob
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """P -> D: the prompt leaves the queue; bind destinations."""

    num_units: int
    queue_s: float
    tail_hash: BlockHash | None
    """Name of the last full block, as computed by the prefill worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """D -> P: destinations are bound; `grant` opens those of the first lane to the named transport."""

    num_units: int
    transport: str
    grant: bytes
    more_grants: tuple[bytes, ...] = ()
    """Grants of the other lanes."""

    @property
    def grants(self) -> tuple[bytes, ...]:
        """Grants of all lanes."""
        return (self.grant, *self.more_grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Refused: nothing was or will be written."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """P -> D: these cells are in the receiver's memory."""

    seq: int
    rewrite: int
    """Number of earlier writes of these cells."""
    cells: CellRange
    checksum: int
    """CRC-32 over the cells' bytes as sent, in the order of the wire (see kv_transfer/layout/mapping.py)."""
    write_s: float
    """Duration of this write by the sender's clock."""
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """D -> P: the named write of this chunk arrived damaged."""

    seq: int
    rewrite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """P -> D: sampled; authoritative from now on."""

    token: SampledToken
    cached_tokens: int
    cached: CachedTokens = NO_CACHED_TOKENS
    """Cached prompt tokens by source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """P -> D: everything is computed; this many chunks make up the hand-off."""

    num_chunks: int
    cached_tokens: int
    times: PhaseTimes
    tail_hash: BlockHash | None
    """The offer's tail hash again, computed from the actual tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAck:
    """D -> P: the sources may be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Give up this attempt."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """P -> D: the sender has no write of this attempt under way and will start none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Both ways: these hand-offs are still running on the sender's side."""

    transfer_ids: tuple[TransferId, ...]


Body = (
    Hello | Prefill | Offer | Reserve | Reject | Chunk | Nack | FirstToken | Seal | CommitAck | Abort | Drained | Renew
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnvelope:
    """A message with the identifiers by which a stale one is recognised."""

    incarnation: Incarnation
    """The sender's incarnation."""
    addressee: Incarnation
    """Incarnation of the process addressed; 0 in the first HELLO, when it is unknown."""
    key: TransferKey | None
    """None for HELLO, RENEW and a REJECT of the link itself."""
    body: Body
