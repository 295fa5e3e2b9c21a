"""Bounds of one engine. Defaults live with the cluster's configuration, never here: a value is stated once."""

from dataclasses import dataclass, fields

from tandem.block_hash import HASH_BLOCK_TOKENS
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the scheduler may do in one step and in total. ConfigError for a bound that cannot work."""

    num_blocks: int
    """Physical KV blocks of the pool, from the memory budget made at start."""
    block_size: int
    """Tokens per physical block: a multiple of the hash block."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    max_batched_tokens: int
    """Tokens computed in one step, over all requests."""
    prefill_chunk_tokens: int
    """Tokens of one request computed in one step: bounds how long a long prompt delays the others."""
    max_running_requests: int
    """Rows of one step."""
    max_waiting_requests: int
    """Queue bound: one more is refused as Overloaded."""
    kv_event_capacity: int
    """KV events kept between two steps; beyond it they are dropped as a visible gap."""
    eos_token_ids: frozenset[int]
    """The model's own end tokens."""

    def __post_init__(self) -> None:
        for bound in fields(self):
            value = getattr(self, bound.name)
            if bound.name != "eos_token_ids" and value < 1:
                raise ConfigError(f"engine.{bound.name} must be at least 1, not {value}")
        if self.block_size % HASH_BLOCK_TOKENS:
            raise ConfigError(f"engine.block_size must be a multiple of {HASH_BLOCK_TOKENS}, not {self.block_size}")

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens that one sequence can ever reach: the model's context, or the whole pool where that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
