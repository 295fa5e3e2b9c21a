"""A worker as the router sees it: its identity, its load, and what placement reads."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.protocol.session_versions import SPOKEN
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.kv_agreement import agree
from tandem.values.kv_layout import KVLayout
from tandem.values.prefix_pin import NO_PINS, PinTotals
from tandem.values.roles import WorkerRole


class WorkerKey(NamedTuple):
    """One process of a worker: a restarted worker is another one."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker's HELLO says; fixed for the life of its process."""

    key: WorkerKey
    role: WorkerRole
    model_name: str
    max_model_len: int
    num_blocks: int
    layout: KVLayout
    handoff_address: str = ""
    """host:port of its hand-off service."""
    transports: frozenset[str] = frozenset()
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks_below: int = 0
    """Room for cached blocks in host memory and on disk."""
    protocol_version: int = SPOKEN.newest
    """Protocol version of the session; a sender of anything newer checks it first, and chooses another worker."""

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV may be cached on the worker, in its pool or below."""
        return (self.num_blocks + self.num_blocks_below) * self.layout.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits the worker's whole pool."""
        return self.num_blocks * self.layout.block_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers and ranks."""
        return self.layout.block_bytes * self.layout.tp_size // self.layout.block_size

    def cannot_pair(self, prefill: "WorkerInfo") -> str | None:
        """Why prompts that `prefill` computes cannot be decoded here, or None."""
        return prefill.cannot_send_to(self)

    def cannot_send_to(self, other: "WorkerInfo") -> str | None:
        """Why KV cannot travel from here to `other`, or None."""
        if self.transports and other.transports and not self.transports & other.transports:
            return f"transports: {sorted(self.transports)} here, {sorted(other.transports)} there"
        return agree(self.layout, other.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTierLoad:
    """One tier of a worker's cache below its pool: gauges of now, totals since the worker's start."""

    tier: str
    num_blocks: int
    capacity_blocks: int
    hits: int
    misses: int
    stores: int
    evictions: int
    stored_bytes: int
    store_s: float
    loaded_bytes: int
    load_s: float
    dropped: int
    damaged: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnds:
    """All of a worker's attempts at moving KV that ended in one way: totals since its start."""

    kind: str
    """`handoff` of a prompt, or `fetch` of a prefix."""
    transport: str
    outcome: str
    count: int
    num_bytes: int
    seconds: float
    """Of just those bytes."""
    chunks: int
    damaged_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSide:
    """One direction of what a worker moved."""

    direction: str
    started: int
    ended: tuple[TransferEnds, ...]
    bad_messages: int
    live: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratedBlocks:
    """What became of blocks that workers which left had offered: totals since the worker's start."""

    outcome: str
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """All that a worker counted of moving KV: totals since its start, and gauges of now."""

    sides: tuple[TransferSide, ...]
    fetches_started: int
    fetches_completed: int
    fetches_failed: int
    fetches_declined: int
    fetched_tokens: int
    lent_tokens: int
    pinned_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    loans: int
    inherited: tuple[MigratedBlocks, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPublishingReport:
    """How a worker fares in publishing its cache events through Redis: totals since its start, and gauges of now."""

    is_up: bool
    connects: int
    entries: int
    states: int
    lag_s: float
    """Age of the oldest change that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStepTotals:
    """Steps of one kind: totals since the worker's start."""

    steps: int
    seconds: float
    tokens: int
    requests: int
    """Summed over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkReport:
    """What a worker's engine has done, and what it holds."""

    prefill: EngineStepTotals
    """Steps that computed prompts."""
    decode: EngineStepTotals
    """Steps that only made one token for each request."""
    preemptions: int
    resident_bytes: int
    """Host memory of the worker's first process; 0: not known."""
    weights_bytes: int
    kv_bytes: int
    flops_per_token: int
    step_sizes: tuple[int, ...] = ()
    """Steps by their tokens, in the buckets of STEP_SIZES; empty: a worker that does not tell."""
    """In the layers' products alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's latest word on its work. A rate of 0 was not measured yet."""

    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    """Of these: they have their room, and a prefill worker is to read their prompt or reads it."""
    backlog_tokens: int = 0
    """Uncomputed tokens of everything accepted."""
    num_free_blocks: int = 0
    """Free or evictable."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    context_tokens: int = 0
    """Tokens of context at which a prompt token takes twice as long to compute as without any. The rate is then the one
    without context, and backlogs count such tokens. 0: not reported; the rate is that of recent prompts."""
    num_quarantined_blocks: int = 0
    cache_tiers: tuple[CacheTierLoad, ...] = ()
    transfers: TransferReport | None = None
    """None for a worker that moves no KV, or has not reported yet."""
    report_number: int = 0
    """Every router hears the same reports under the same numbers."""
    board: RedisPublishingReport | None = None
    """None of a worker that does not publish there."""
    step_age_s: float = 0.0
    """For how long its engine has been in the same step."""
    pins: PinTotals = NO_PINS
    work: EngineWorkReport | None = None
    """None of a worker that does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """All that placement may know of one worker at one moment."""

    info: WorkerInfo
    load: WorkerLoad
    backlog_tokens: int
    """Uncomputed tokens that a new request queues behind, with what this router sent since the last load report."""
    num_active: int
    """Requests running, waiting or on their way."""
    draining: bool = False
    penalty_ms: float = 0.0
    """After a refusal or failure: how long the worker is better left alone."""
    backlog_now: int | None = None
    """The uncomputed tokens of what this router has there as of this moment, and what others had by the last report;
    None: not known. Unlike `backlog_tokens` it falls with every first token, and is never too high
    for long."""
    num_active_now: int | None = None
    """The same of requests."""
    answered_s: float = 0.0
    """When its last token came, or else when it joined; on the router's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChange:
    """Changes of one worker's prefix cache, numbered."""

    first_sequence: int
    """Number of the first change; of a snapshot, of the next change after it."""
    snapshot: bool
    """The blocks stored here, uncounted, replace everything known before."""
    changes: tuple[tuple[BlockHash, bool], ...]
    """Each a block's name and whether it was stored (else evicted)."""
