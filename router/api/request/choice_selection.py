"""Some of the choices that were generated: the likeliest of them, or the answer that most of them agree on. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.values.outputs import SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSelection:
    """What a client wants of the choices of each prompt."""

    candidates: int
    """Choices generated: the request's `num_choices`."""
    keep: int
    """Choices shown."""
    votes: bool = False
    """Whether one choice is shown: the answer that most candidates gave."""
    pattern: str | None = None
    """What of a text is its answer: what this regex finds, its first group if it has one. None: all of it."""
    shows_logprobs: bool = True
    """Whether the client itself requested log probabilities, not the selection alone."""

    @property
    def param(self) -> str:
        """The field that says how many are generated."""
        return "n" if self.votes else "best_of"


class VoteResult(NamedTuple):
    """The result of a vote."""

    winner: int
    """The first candidate that gave the answer."""
    answer: str | None
    """None: no candidate had one, and the first candidate wins."""
    num_votes: int


def likeliest(candidates: Sequence[Sequence[SampledToken]], keep: int) -> list[int]:
    """The candidates with the greatest sum of log probabilities, the greatest first; the earlier one where they tie."""
    scores = [sum(token.logprob or 0.0 for token in tokens) for tokens in candidates]
    return sorted(range(len(candidates)), key=lambda index: -scores[index])[:keep]


def elect(answers: Sequence[str | None]) -> VoteResult:
    """The answer that most gave, the one given first where they tie; who has none does not vote."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return VoteResult(0, None, 0)
    # Counted in the order of the candidates, and of equals `max` takes the first.
    answer = max(counts, key=lambda one: counts[one])
    return VoteResult(answers.index(answer), answer, counts[answer])
