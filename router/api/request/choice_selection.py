"""Selects among generated choices: the likeliest ones, or the answer that most of them agree on. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.values.outputs import SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSelection:
    """Number of choices to generate for each prompt, and the choices to show."""

    candidates: int
    """Choices to generate: the request's `num_choices`."""
    keep: int
    """Number of choices to show."""
    votes: bool = False
    """Whether one choice is shown: the answer that most candidates gave."""
    pattern: str | None = None
    """Regex that finds the answer within a text, in its first group if it has one; None: the whole text is the
    answer."""
    shows_logprobs: bool = True
    """Whether the client itself requested log probabilities, not the selection alone."""

    @property
    def param(self) -> str:
        """The field that states how many are generated."""
        return "n" if self.votes else "best_of"


class VoteResult(NamedTuple):
    """The outcome of a vote."""

    winner: int
    """The first candidate that gave the answer."""
    answer: str | None
    """The winning answer; None: no candidate had one, and the first candidate wins."""
    num_votes: int


def likeliest(candidates: Sequence[Sequence[SampledToken]], keep: int) -> list[int]:
    """Return the candidates with the greatest sum of log probabilities, greatest first; ties go to the earlier one."""
    scores = [sum(token.logprob or 0.0 for token in tokens) for tokens in candidates]
    return sorted(range(len(candidates)), key=lambda index: -scores[index])[:keep]


def elect(answers: Sequence[str | None]) -> VoteResult:
    """Elect the answer that most candidates gave; ties go to the one given first; a candidate without an answer
    abstains."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return VoteResult(0, None, 0)
    # Counted in the order of the candidates, and `max` returns the first of equals.
    answer = max(counts, key=lambda one: counts[one])
    return VoteResult(answers.index(answer), answer, counts[answer])
