"""Duration of a worker's step: the only part of a simulated worker that is not the real one.

A step costs a fixed time, plus a time per prompt token, per pair of a prompt token and one before it (attention), per
decoding sequence, and per token of their contexts (reading the cache). It is affine in each of them, so that a run of
equal steps has a closed form.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.types.request import BatchItem


class StepWork(NamedTuple):
    """Work that one step computes."""

    num_prompt_tokens: int
    num_pairs: int
    """Pairs of a prompt token and one at or before it."""
    num_rows: int
    """Sequences that compute one token each, and drafts."""
    num_context_tokens: int
    """Context tokens of all rows."""


def work_of(items: Iterable[BatchItem]) -> StepWork:
    """Return the work of a batch."""
    num_prompt_tokens = num_pairs = num_rows = num_context_tokens = 0
    for _, start, num_tokens, _, drafts in items:
        if num_tokens == 1:
            rows = 1 + len(drafts)
            num_rows += rows
            num_context_tokens += rows * (start + 1) + rows * (rows - 1) // 2
        else:
            num_prompt_tokens += num_tokens
            num_pairs += num_tokens * (2 * start + num_tokens + 1) // 2
    return StepWork(num_prompt_tokens, num_pairs, num_rows, num_context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLatency:
    """Duration of a step by its work, in seconds, and the size of the KV to move."""

    step_s: float = 0.0
    prompt_token_s: float
    pair_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0
    kv_bytes_per_token: int = 131_072
    """Bytes of KV per token; the default is that of 8 billion parameters: 8 KV heads of 128, 32 layers, bfloat16."""
    source: str = "stated"
    """Origin of the figures."""

    def seconds(self, work: StepWork) -> float:
        """Return the duration of one step, in seconds."""
        return (
            self.step_s
            + self.prompt_token_s * work.num_prompt_tokens
            + self.pair_s * work.num_pairs
            + self.row_s * work.num_rows
            + self.context_token_s * work.num_context_tokens
        )

    def run_seconds(self, num_rows: int, num_context_tokens: int, num_steps: int) -> float:
        """Return the duration of decode-only steps, each with `num_rows` more tokens of context than the one before."""
        first = self.step_s + self.row_s * num_rows + self.context_token_s * num_context_tokens
        return num_steps * (first + self.context_token_s * num_rows * (num_steps - 1) / 2)

    def prompt_seconds(self, num_cached_tokens: int, num_tokens: int, chunk_tokens: int) -> float:
        """Return the duration of a prompt that is computed alone, with a cached prefix."""
        num_computed = num_tokens - num_cached_tokens
        num_pairs = num_computed * (num_cached_tokens + num_tokens + 1) // 2
        num_steps = -(-num_computed // chunk_tokens)
        return self.step_s * num_steps + self.prompt_token_s * num_computed + self.pair_s * num_pairs
