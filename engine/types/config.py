"""Bounds of one engine. Defaults live with the cluster's configuration, never here: a value is stated once."""

from dataclasses import dataclass

from engine.types.windows import WindowSpec
from tandem.errors import ConfigError
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.step_sizes import DRAFT_SOURCES

EVICTION_POLICIES = ("lru", "lfu", "prefix")
"""Names of the policies in `engine.kv_cache.eviction.POLICIES`."""
_MAX_DRAFTED_SEQUENCES = 16
_MOST_DRAFT_TOKENS = 64
_AT_LEAST_ONE = (
    "num_blocks",
    "block_size",
    "max_model_len",
    "max_batched_tokens",
    "prefill_chunk_tokens",
    "max_running_requests",
    "max_waiting_requests",
    "kv_event_capacity",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits on what the scheduler may do in one step and in total. Raises ConfigError for a bound that cannot work."""

    num_blocks: int
    """Physical KV blocks of the pool, from the memory budget made at start."""
    block_size: int
    """Tokens per physical block: a multiple of the hash block."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    max_batched_tokens: int
    """Tokens computed in one step, over all requests."""
    prefill_chunk_tokens: int
    """Prompt tokens computed in one step, given to requests in order: bounds how long prompts delay the sequences
    that are being generated, and how long a later prompt delays an earlier one."""
    max_step_s: float | None
    """Time that a step beside decodes is planned to end in: it gets fewer prompt tokens where the machine is too slow
    for `prefill_chunk_tokens` (see `engine.scheduler.chunk_size`); None: no such bound."""
    max_running_requests: int
    """Most requests that may run at once: rows of one step."""
    max_waiting_requests: int
    """Most requests that may wait: the next one is refused as Overloaded."""
    kv_event_capacity: int
    """KV events kept between two steps; beyond it they are dropped as a visible gap."""
    eos_token_ids: frozenset[int]
    """The model's own end tokens."""
    eviction: str
    """Order in which cached blocks are evicted: one of `EVICTION_POLICIES`."""
    max_overtakes: int
    """Requests that may overtake an earlier one because more of their prompt is cached; 0: none."""
    windows: WindowSpec | None = None
    """Of a model whose windowed layers have blocks of their own; None: a block holds all layers."""
    priority_aging_s: float | None
    """Delay by which a request of the next lower priority ranks later; None: it ranks strictly after all above it."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {value}")
        if self.max_overtakes < 0:
            raise ConfigError(f"engine.max_overtakes must be at least 0, not {self.max_overtakes}")
        for name in ("max_step_s", "priority_aging_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ConfigError(f"engine.{name} must be above 0, not {seconds}")
        if self.eviction not in EVICTION_POLICIES:
            raise ConfigError(f"engine.eviction must be one of {', '.join(EVICTION_POLICIES)}, not {self.eviction!r}")
        if self.block_size % HASH_BLOCK_TOKENS:
            raise ConfigError(f"engine.block_size must be a multiple of {HASH_BLOCK_TOKENS}, not {self.block_size}")

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens that one sequence can ever reach: the model's context, or the whole pool where that is smaller."""
        if self.windows is not None:
            return min(self.max_model_len, self.windows.max_tokens(self.num_blocks))
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafts of one engine: tokens that a step verifies beside the one it would compute anyway. See
    `engine.speculation.proposer`. Raises ConfigError for a bound that cannot work.
    """

    sources: tuple[str, ...]
    """Sources of drafts, by priority: some of `DRAFT_SOURCES`; empty: no speculation."""
    max_draft_tokens: int
    """Most drafts of one sequence in one step."""
    adaptive: bool
    """Verify only as many as pays by measured times; False: whatever is proposed."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= _MOST_DRAFT_TOKENS:
            raise ConfigError(
                f"engine.speculation.max_draft_tokens must be in [1, {_MOST_DRAFT_TOKENS}], not {self.max_draft_tokens}"
            )
        unknown = [name for name in self.sources if name not in DRAFT_SOURCES]
        if unknown:
            raise ConfigError(
                f"engine.speculation.sources must be some of {', '.join(DRAFT_SOURCES)}, not {unknown[0]!r}"
            )

    @property
    def max_draft_rows(self) -> int:
        """Most drafts of one step, over all sequences: as many as a few sequences can have. With more sequences than
        that, verifying costs about as much as computing, so room for all of their drafts would be wasted memory.
        """
        return _MAX_DRAFTED_SEQUENCES * self.max_draft_tokens if self.sources else 0
