"""Prompt scoring in the engine: what to compute of a prompt's own tokens, and the results so far.

A request that carries a `PromptScoringState` computes its prompt as any other does, in chunks and between preemptions;
the rows of each chunk are scored before they are discarded. KV that is in the cache has no rows to score, so such a
request reuses of a prefix only what lies before the first row that it needs, and what it has scored itself. Belongs to
the engine thread until its request has ended.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.errors import InvariantError
from tandem.values.pooling import PoolingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPooling:
    """How the last hidden states of a prompt become vectors."""

    modes: tuple[PoolingMode, ...] = (PoolingMode.MEAN,)
    num_skipped: int = 0
    """Leading tokens that are not pooled."""


@dataclass(slots=True, kw_only=True, eq=False)
class PromptScoringState:
    """Log probabilities of all prompt tokens but the first; or those of `label_token_ids` after the prompt; or the
    prompt's pooled hidden states.
    """

    num_prompt_tokens: int
    num_top: int | None
    """Most likely alternatives to report for each token; None: hidden states, and no log probabilities."""
    pooling: PromptPooling = field(default_factory=PromptPooling)
    label_token_ids: tuple[int, ...] = ()
    num_scored: int = field(init=False)
    """Leading rows that have been scored or pooled, or that nothing is wanted of."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # [num_scored]
    ranks: "array[int]" = field(default_factory=lambda: array("i"))  # [num_scored], 1: no token was more likely
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))  # [num_scored * num_top]
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # [num_scored * num_top]
    pooled: "dict[int, array[float]]" = field(default_factory=dict)
    """Sum, or maximum, of the rows so far for each mode by its place, `[hidden_size]`."""

    def __post_init__(self) -> None:
        """Raises InvariantError when all tokens would be left out."""
        if not 0 <= self.pooling.num_skipped < max(1, self.num_prompt_tokens):
            raise InvariantError(f"{self.pooling.num_skipped} of {self.num_prompt_tokens} tokens are not pooled")
        self.num_scored = self._first_wanted

    @property
    def num_wanted(self) -> int:
        """End of the rows to score: a row has the log probability of the next token, so the last row has none."""
        if self.num_top is not None:
            return self.num_prompt_tokens - (not self.label_token_ids)
        return self.pooling.num_skipped + 1 if self._is_of(PoolingMode.CLS) else self.num_prompt_tokens

    @property
    def may_reuse(self) -> bool:
        """Whether only the last row is left to score, so that the request may reuse KV as any other."""
        return self.num_scored == self.num_prompt_tokens - 1 < self.num_wanted

    @property
    def _first_wanted(self) -> int:
        if self.num_top is not None:
            return self.num_prompt_tokens - 1 if self.label_token_ids else 0
        return self.num_prompt_tokens - 1 if self._is_of(PoolingMode.LAST) else self.pooling.num_skipped

    def _is_of(self, mode: PoolingMode) -> bool:
        return self.pooling.modes == (mode,)

    def rows(self, start: int, num_tokens: int) -> range:
        """Positions to score in a step of `num_tokens` tokens; those scored before a preemption are left out."""
        return range(max(start, self.num_scored), min(start + num_tokens, self.num_wanted))

    def num_entries(self, start: int, num_tokens: int) -> int:
        """Log probabilities that a step of `num_tokens` tokens computes."""
        return len(self.rows(start, num_tokens)) * max(1, len(self.label_token_ids))

    def pooled_rows(self, start: int, num_tokens: int) -> list[tuple[int, range]]:
        """Positions to pool in a step of `num_tokens` tokens, for each mode by its place that has any."""
        rows = self.rows(start, num_tokens)
        found: list[tuple[int, range]] = []
        first, last = self.pooling.num_skipped, self.num_prompt_tokens - 1
        for place, mode in enumerate(self.pooling.modes):
            only = {PoolingMode.CLS: first, PoolingMode.LAST: last}.get(mode)
            wanted = rows if only is None else range(only, only + (only in rows))
            if wanted:
                found.append((place, wanted))
        return found

    def weight(self, place: int, position: int) -> int:
        """Factor of a row in the sum of the mode at this place; 0: the maximum of the rows is wanted, not their sum."""
        mode = self.pooling.modes[place]
        if mode is PoolingMode.WEIGHTED_MEAN:
            return position + 1
        return 0 if mode is PoolingMode.MAX else 1

    def scored(
        self,
        count: int,
        *,
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
    ) -> None:
        """Append the next `count` entries. Raises InvariantError for sequences of other lengths."""
        width = count * (self.num_top or 0)
        if (len(logprobs), len(ranks), len(top_ids), len(top_logprobs)) != (count, count, width, width):
            raise InvariantError(f"{len(logprobs)} scores of {count} rows")
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.top_ids.extend(top_ids)
        self.top_logprobs.extend(top_logprobs)
        self._advance(count // max(1, len(self.label_token_ids)))

    def pool(self, count: int, found: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Add the next `count` rows: of each mode by its place, what `weight` says has been made of them."""
        for place, values in found:
            before = self.pooled.get(place)
            if before is None:
                self.pooled[place] = array("d", values)
            elif self.pooling.modes[place] is PoolingMode.MAX:
                self.pooled[place] = array("d", map(max, before, values))
            else:
                self.pooled[place] = array("d", map(float.__add__, before, values))
        self._advance(count)

    def vector(self) -> list[float]:
        """The pooled states: each mode's, one after another."""
        found: list[float] = []
        for place in range(len(self.pooling.modes)):
            divisor = self._divisor(self.pooling.modes[place])
            found += [total / divisor for total in self.pooled[place]]
        return found

    def _divisor(self, mode: PoolingMode) -> float:
        first, end = self.pooling.num_skipped, self.num_prompt_tokens
        if mode is PoolingMode.MEAN:
            return end - first
        if mode is PoolingMode.MEAN_SQRT_LEN:
            return math.sqrt(end - first)
        return (first + 1 + end) * (end - first) / 2 if mode is PoolingMode.WEIGHTED_MEAN else 1.0

    def _advance(self, count: int) -> None:
        self.num_scored += count
        if self.num_scored > self.num_wanted:
            raise InvariantError(f"{self.num_scored} rows scored of {self.num_wanted}")
