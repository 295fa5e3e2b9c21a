"""Prompt logprobs in the engine: what to compute for a prompt's own tokens, and the results so far.

A request that carries a `PromptScoringState` computes its prompt as any other does, in chunks and between preemptions;
the rows of each chunk are scored before they are discarded. KV that is in the cache has no rows to score, so such a
request reuses nothing of a prefix but what it has scored itself. Belongs to the engine thread until its request has
ended.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.errors import InvariantError


@dataclass(slots=True, kw_only=True, eq=False)
class PromptScoringState:
    """Log probabilities of all prompt tokens but the first, or the mean of the prompt's last hidden states."""

    num_prompt_tokens: int
    num_top: int | None
    """Most likely alternatives to report for each token; None: hidden states, and no log probabilities."""
    num_scored: int = 0
    """Leading rows that have been scored or added to the mean."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # [num_scored]
    ranks: "array[int]" = field(default_factory=lambda: array("i"))  # [num_scored], 1: no token was more likely
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))  # [num_scored * num_top]
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # [num_scored * num_top]
    hidden_sum: "array[float]" = field(default_factory=lambda: array("d"))  # [hidden_size], once there is a row

    @property
    def num_wanted(self) -> int:
        """Rows to score: a row has the log probability of the next token, so the last row has none."""
        return self.num_prompt_tokens - (self.num_top is not None)

    def rows(self, start: int, num_tokens: int) -> range:
        """Positions to score in a step of `num_tokens` tokens; those scored before a preemption are left out."""
        return range(max(start, self.num_scored), min(start + num_tokens, self.num_wanted))

    def scored(
        self,
        count: int,
        *,
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
    ) -> None:
        """Append the scores of the next `count` rows. Raises InvariantError for sequences of other lengths."""
        width = count * (self.num_top or 0)
        if (len(logprobs), len(ranks), len(top_ids), len(top_logprobs)) != (count, count, width, width):
            raise InvariantError(f"{len(logprobs)} scores of {count} rows")
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.top_ids.extend(top_ids)
        self.top_logprobs.extend(top_logprobs)
        self._advance(count)

    def pooled(self, count: int, hidden_sum: Sequence[float]) -> None:
        """Add the sum of the hidden states of the next `count` rows."""
        before = self.hidden_sum or array("d", bytes(8 * len(hidden_sum)))
        self.hidden_sum = array("d", map(float.__add__, before, hidden_sum))
        self._advance(count)

    def mean(self) -> list[float]:
        """The mean of all rows' hidden states."""
        return [total / self.num_scored for total in self.hidden_sum]

    def _advance(self, count: int) -> None:
        self.num_scored += count
        if self.num_scored > self.num_wanted:
            raise InvariantError(f"{self.num_scored} rows scored of {self.num_wanted}")
