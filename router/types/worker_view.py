"""A worker as the router sees it: its identity, its load, and what placement reads."""

from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from tandem.protocol.session_versions import SPOKEN
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.kv_agreement import agree
from tandem.values.kv_layout import KVLayout
from tandem.values.prefix_pin import NO_PINS, PinTotals
from tandem.values.roles import WorkerRole


class WorkerKey(NamedTuple):
    """One process of a worker; after a restart it is a different one."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerInfo(Struct, frozen=True, kw_only=True, dict=True):
    """A worker's HELLO, fixed for the life of its process."""

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
    """Capacity for cached blocks in host memory and on disk."""
    protocol_version: int = SPOKEN.newest
    """Protocol version of the session; senders of newer messages check it first, and choose another worker."""
    rack: str = ""
    """Name of the rack, or another part of the network that is fast within itself; empty: unknown."""
    is_direct: bool = False
    """Whether its session has a connection of its own; else it remains on gRPC."""

    @property
    def cache_tokens(self) -> int:
        """Most tokens whose KV may be cached on the worker, in its pool or below."""
        return (self.num_blocks + self.num_blocks_below) * self.layout.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens of the longest sequence whose KV fits the worker's whole pool."""
        return self.tokens_in(self.num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, of all groups of layers, that a sequence of `num_tokens` tokens takes when it arrives.

        Where windowed layers are kept apart, it takes a few more while the worker computes it.
        """
        layout = self.layout
        token_blocks = -(-num_tokens // layout.block_size)
        if not layout.windowed_layers:
            return token_blocks
        return token_blocks + (len(layout.groups) - 1) * (token_blocks - layout.first_window_block(num_tokens))

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that `num_blocks` blocks hold: the inverse of `blocks_for`."""
        layout = self.layout
        if layout.windowed_layers:
            num_groups = len(layout.groups) - 1
            most = 1 - (1 - layout.window) // layout.block_size  # blocks that a window extends over
            num_blocks = max(min(num_blocks // (1 + num_groups), most), num_blocks - num_groups * most)
        return num_blocks * layout.block_size

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers and ranks; asked for each request."""
        return self.layout.block_bytes * self.layout.tp_size // self.layout.block_size

    def cannot_pair(self, prefill: "WorkerInfo") -> str | None:
        """Return why prompts that `prefill` computes cannot be decoded here; None if they can."""
        return prefill.cannot_send_to(self)

    def cannot_send_to(self, other: "WorkerInfo") -> str | None:
        """Return why KV cannot be sent from here to `other`; None if it can."""
        if self.transports and other.transports and not self.transports & other.transports:
            return f"transports: {sorted(self.transports)} here, {sorted(other.transports)} there"
        return agree(self.layout, other.layout)


class CacheTierLoad(Struct, frozen=True, kw_only=True):
    """One tier of a worker's cache below its pool: current gauges, and totals since the worker's start."""

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


class TransferEnds(Struct, frozen=True, kw_only=True):
    """A worker's KV transfers that ended in one way: totals since its start."""

    kind: str
    """`handoff` of a prompt, or `fetch` of a prefix."""
    transport: str
    outcome: str
    count: int
    num_bytes: int
    seconds: float
    """Seconds spent on those bytes."""
    chunks: int
    damaged_chunks: int


class TransferSide(Struct, frozen=True, kw_only=True):
    """One direction of a worker's transfers."""

    direction: str
    started: int
    ended: tuple[TransferEnds, ...]
    bad_messages: int
    live: int
    bytes_per_s: float


class MigratedBlocks(Struct, frozen=True, kw_only=True):
    """Blocks offered by workers that left, by outcome: totals since the worker's start."""

    outcome: str
    num_blocks: int
    num_bytes: int


class TransferReport(Struct, frozen=True, kw_only=True):
    """A worker's counts of KV transfers: totals since its start, and current gauges."""

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


class RedisPublishingReport(Struct, frozen=True, kw_only=True):
    """A worker's publishing of cache events through Redis: totals since its start, and current gauges."""

    is_up: bool
    connects: int
    entries: int
    states: int
    lag_s: float
    """Age of the oldest change that is not published yet."""


class EngineStepTotals(Struct, frozen=True, kw_only=True):
    """Totals of one kind of steps since the worker's start."""

    steps: int
    seconds: float
    tokens: int
    requests: int
    """Requests, summed over steps."""
    draft_tokens: int = 0
    """Drafts among the tokens."""
    accepted_tokens: int = 0
    """Drafts that were right."""


class DraftSourceTotals(Struct, frozen=True, kw_only=True):
    """Totals of the drafts of one source since the worker's start."""

    source: str
    drafts: int
    draft_tokens: tuple[int, ...]
    """Verified tokens by their place in the draft; later places count for the last of `DRAFT_PLACES`."""
    accepted_tokens: tuple[int, ...]
    """Those that were right."""


class EngineWorkReport(Struct, frozen=True, kw_only=True):
    """The work that a worker's engine has done, and the memory that it holds."""

    prefill: EngineStepTotals
    """Steps that computed prompts."""
    decode: EngineStepTotals
    """Steps that only computed one token for each request, drafts aside."""
    preemptions: int
    resident_bytes: int
    """Host memory of the worker's first process; 0: unknown."""
    weights_bytes: int
    kv_bytes: int
    flops_per_token: int
    """Operations per token, counting only the layers' matrix products."""
    step_sizes: tuple[int, ...] = ()
    """Number of steps by size in tokens, in the buckets of STEP_SIZES; empty: not reported."""
    drafts: tuple[DraftSourceTotals, ...] = ()
    """By source, those that have drafted; empty also where the worker's version does not report them."""


class AdapterReport(Struct, frozen=True, kw_only=True):
    """A worker's loading of LoRA adapters: totals since its start, and what it holds."""

    loads: int
    evictions: int
    failures: int
    load_seconds: float
    """From the beginning of reading to the use in the next step, of all loads."""
    num_waiting: int
    """Requests that wait for their adapter."""
    num_resident: int
    held_bytes: int
    """Of one rank."""
    capacity_bytes: int


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """A worker's latest load report. A rate of 0 was not measured often enough yet."""

    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    """Waiting requests with reserved room, whose prompt a prefill worker computes or will compute."""
    backlog_tokens: int = 0
    """Uncomputed tokens of all accepted requests."""
    num_free_blocks: int = 0
    """Blocks that are free or evictable."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    context_tokens: int = 0
    """Tokens of context at which a prompt token takes twice as long to compute as without context. The rate is then the
    one without context, and backlogs count such tokens. 0: not reported; the rate is that of recent prompts."""
    num_quarantined_blocks: int = 0
    cache_tiers: tuple[CacheTierLoad, ...] = ()
    transfers: TransferReport | None = None
    """None for a worker that transfers no KV, or has not reported yet."""
    report_number: int = 0
    """Number of the report; every router receives the same reports under the same numbers."""
    redis_publishing: RedisPublishingReport | None = None
    """None for a worker that does not publish in Redis."""
    step_age_s: float = 0.0
    """Seconds for which its engine has been in the same step."""
    pins: PinTotals = NO_PINS
    work: EngineWorkReport | None = None
    """None for a worker that does not report it."""
    resident_adapters: frozenset[str] = frozenset()
    """Digests of the LoRA adapters that it has loaded."""
    adapters: AdapterReport | None = None
    """None for a worker that takes no adapters, or does not report it."""


class WorkerSnapshot(Struct, frozen=True, kw_only=True):
    """The state of one worker at one moment, as placement sees it."""

    info: WorkerInfo
    load: WorkerLoad
    backlog_tokens: int
    """Uncomputed tokens that a new request queues behind, including what this router sent since the last load
    report."""
    num_active: int
    """Requests running, waiting or in transit."""
    draining: bool = False
    penalty_ms: float = 0.0
    """Time for which the worker should be avoided after a refusal or failure."""
    backlog_now: int | None = None
    """Uncomputed tokens of this router's requests there as of this moment, and of others' as of the last report; None:
    unknown. Unlike `backlog_tokens` it falls with every first token, and is never too high for long."""
    num_active_now: int | None = None
    """Requests, counted in the same way."""
    answered_s: float = 0.0
    """Time of its last token, or else when it joined; on the router's clock."""


class PrefixChange(Struct, frozen=True, kw_only=True):
    """Numbered changes of one worker's prefix cache."""

    first_sequence: int
    """Number of the first change; for a snapshot, of the next change after it."""
    snapshot: bool
    """Whether the blocks stored here, which are not numbered, replace everything known before."""
    changes: tuple[tuple[BlockHash, bool], ...]
    """The name of each block and whether it was stored (else evicted)."""
