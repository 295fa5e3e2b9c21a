"""Beam search as `transformers` does it without sampling: which beams each step keeps, and when the search ends. Pure.

Each step needs the likeliest continuations of every running beam. It considers the best of all of them together, enough
that a full set remains running even if all better ones end. A beam that ends counts only if it was among the best
`num_beams` of its step; its score is its sum of log probabilities, divided by a power of its length.
"""

from collections.abc import Sequence
from typing import NamedTuple

from router.types.requests import BeamSearchParams
from tandem.values.outputs import FinishReason, SampledToken


class Beam(NamedTuple):
    """One partial answer of a search."""

    tokens: tuple[SampledToken, ...]
    total: float
    """Sum of its log probabilities."""


class EndedBeam(NamedTuple):
    beam: Beam
    score: float
    reason: FinishReason


class BeamSearch:
    def __init__(self, ask: BeamSearchParams, *, max_tokens: int) -> None:
        self._ask = ask
        self._max_tokens = max_tokens
        self._length = 0
        self.running: list[Beam] = [Beam((), 0.0)]
        """Beams still running, the best first."""
        self.ended: list[EndedBeam] = []
        """Ended beams, at most `num_beams`, the best first."""
        self.is_over = False

    def advance(self, continuations: Sequence[Sequence[SampledToken]]) -> None:
        """Advance by one step: for each running beam, in order, `num_next` tokens with their log probabilities."""
        ask = self._ask
        found = [
            (beam.total + (token.logprob or 0.0), beam, token)
            for beam, tokens in zip(self.running, continuations, strict=True)
            for token in tokens
        ]
        # A stable order: of equals, the better beam's comes first. Only the best are worth copying their beam.
        best = sorted(found, key=lambda one: -one[0])[: ask.num_next]
        candidates = [Beam((*beam.tokens, token), total) for total, beam, token in best]
        self._length += 1
        going_on = [beam for beam in candidates if self._reason(beam) is None]
        if not (ask.early_stopping is True and self._is_full):
            self._end_some(candidates[: ask.num_beams])
        self.running = going_on[: ask.num_beams]
        all_have_ended = ask.early_stopping is True and self._is_full
        self.is_over = not self.running or all_have_ended or not self._may_improve()

    @property
    def _is_full(self) -> bool:
        return len(self.ended) == self._ask.num_beams

    def _reason(self, beam: Beam) -> FinishReason | None:
        if beam.tokens[-1].token_id in self._ask.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._length == self._max_tokens else None

    def _end_some(self, best: Sequence[Beam]) -> None:
        ended = [
            EndedBeam(beam, self._score(beam.total, self._length), reason)
            for beam in best
            if (reason := self._reason(beam)) is not None
        ]
        self.ended = sorted([*self.ended, *ended], key=lambda one: -one.score)[: self._ask.num_beams]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._ask.length_penalty)

    def _may_improve(self) -> bool:
        """Whether the best running beam can still be among the best; a heuristic unless `early_stopping` is "never"."""
        if not self._is_full:
            return True
        longest = self._ask.early_stopping == "never" and self._ask.length_penalty > 0.0
        length = self._max_tokens if longest else self._length
        return self._score(self.running[0].total, length) > self.ended[-1].score
