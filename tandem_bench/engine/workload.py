"""Jobs for every engine, and the definition of their times, the same for all.

All prompts of a job are submitted at once. *Prefill* lasts until each of them has its first token, *decode* from then
to the last token: prefill tokens/s are the prompts' tokens over the first span, decode tokens/s are the tokens that
arrived in the second span over its length. Tokens that early sequences emit while others are still in their prompt
count for neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from tandem_bench.spine.speed import percentile

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts to continue greedily, each by `num_tokens`."""

    prompts: tuple[Tokens, ...]
    num_tokens: int
    adapter_slots: tuple[int, ...] = ()
    """Slot of the adapter of each prompt, -1 for none; empty: none has one."""
    newcomers: tuple[Tokens, ...] = ()
    """Prompts that arrive one after another while the others decode: see tandem_bench.peers.host."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Time that the engine's thread spent on each part of a job, in seconds over all steps."""

    num_steps: int
    wall_s: float
    execute_s: float
    """Time in the runner: laying out, the model, sampling."""
    model_s: float
    """Time in the model alone: hidden states and logits."""
    decode_steps_s: tuple[float, ...]
    """Duration of each step that ran no prompt."""

    @property
    def overhead_percent(self) -> float:
        """Share of the time outside the model."""
        return 100 * (1 - self.model_s / self.wall_s)

    @property
    def scheduling_percent(self) -> float:
        """Share of the time outside the runner: choosing a batch, processing its tokens, reporting."""
        return 100 * (1 - self.execute_s / self.wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times of the tokens of one job."""

    job: Job
    arrivals_s: tuple[tuple[float, ...], ...]
    """Times of each prompt's tokens, in seconds since the prompts were submitted."""
    num_newcomers: int = 0
    steps: StepCosts | None = None
    tokens: tuple[Tokens, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        wanted = self.job.num_tokens
        if len(self.arrivals_s) != len(self.job.prompts) or any(len(row) != wanted for row in self.arrivals_s):
            raise ValueError(f"{wanted} tokens were requested for each of {len(self.job.prompts)} prompts")

    @property
    def prefill_s(self) -> float:
        """Time until the last of the prompts had its first token."""
        return max(row[0] for row in self.arrivals_s)

    @property
    def end_s(self) -> float:
        """Time until the last token."""
        return max(row[-1] for row in self.arrivals_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.job.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode rate as defined above; NaN when no token came after the last first one."""
        span_s = self.end_s - self.prefill_s
        count = sum(time_s > self.prefill_s for row in self.arrivals_s for time_s in row)
        return count / span_s if span_s > 0 else math.nan

    @property
    def first_token_s(self) -> float:
        """Median time to first token."""
        return median(row[0] for row in self.arrivals_s)

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive tokens of one answer."""
        return [after - before for row in self.arrivals_s for before, after in pairwise(row)]

    def gap_s(self, percent: float) -> float:
        """Return a percentile of the gaps; NaN when answers have one token."""
        return percentile(self.gaps_s, percent) if self.gaps_s else math.nan


def outcome(job: Job, reply: dict[str, Any]) -> Outcome:
    """Parse the answer of an engine's process. Raises ValueError when it does not fit the job."""
    steps = reply.get("steps")
    if steps is not None:
        steps = StepCosts(**{**steps, "decode_steps_s": tuple(steps["decode_steps_s"])})
    return Outcome(
        job=job,
        arrivals_s=tuple(map(tuple, reply["arrivals_s"])),
        num_newcomers=reply["num_newcomers"],
        steps=steps,
        tokens=tuple(map(tuple, reply.get("tokens", ()))),
    )


def random_prompts(rng: Random, count: int, length: int, vocab_size: int) -> tuple[Tokens, ...]:
    """Generate prompts without a shared prefix; the lowest ids are left to control tokens and bytes."""
    lowest = min(300, vocab_size // 2)
    return tuple(tuple(rng.randrange(lowest, vocab_size) for _ in range(length)) for _ in range(count))


def median_of(values: Sequence[float]) -> float:
    """Return the median; NaN without values."""
    return median(values) if values else math.nan
