"""Proposers for tests: one that knows the answers, one that is always wrong, and what lies between."""

from array import array
from collections.abc import Callable, Sequence
from random import Random

from engine.speculation.prediction import ClientPrediction
from engine.speculation.proposer import Ask, Draft, Proposer
from engine.speculation.speculation import Speculation
from engine.types.config import SpeculationConfig
from engine.types.request import Request

Answers = Callable[[Request], Sequence[int]]
"""The whole output that a request must get, as far as it is known."""


class Oracle:
    """Proposes what will come. Implements Proposer."""

    name = "oracle"

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.num_proposed = 0
        self.num_kept = 0
        self.forgotten: list[Request] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [Draft(tuple(self.tokens(request, most)), self.name) for request, most in asks]
        self.num_proposed += sum(len(draft.token_ids) for draft in drafts)
        return drafts

    def tokens(self, request: Request, most: int) -> list[int]:
        coming = list(self.answers(request))[request.num_output_tokens :]
        return coming[:most]

    def settled(self, request: Request, num_kept: int) -> None:
        self.num_kept += num_kept

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)


class AlwaysWrong(Oracle):
    """Proposes anything but what will come."""

    name = "wrong"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        super().__init__(answers)
        self._vocab_size = vocab_size

    def tokens(self, request: Request, most: int) -> list[int]:
        coming = super().tokens(request, most)
        wrong = [(token + 1) % self._vocab_size for token in coming]
        return wrong + [0] * (most - len(wrong)) if wrong else []


class HalfRight(Oracle):
    """Right up to a random place, and drafts of random length."""

    name = "half"

    def __init__(self, answers: Answers, vocab_size: int, rng: Random) -> None:
        super().__init__(answers)
        self._vocab_size = vocab_size
        self._rng = rng

    def tokens(self, request: Request, most: int) -> list[int]:
        coming = super().tokens(request, most)
        first_wrong = self._rng.randrange(most + 1)
        drafts = [
            (token + 1 + self._rng.randrange(self._vocab_size - 1)) % self._vocab_size if i >= first_wrong else token
            for i, token in enumerate(coming)
        ]
        return drafts[: self._rng.randrange(most + 1)]


class EditedPrediction(ClientPrediction):
    """Gives each request a prediction at its first draft: the output that it must get, with some tokens changed."""

    def __init__(self, answers: Answers, vocab_size: int, rng: Random) -> None:
        super().__init__()
        self._answers = answers
        self._vocab_size = vocab_size
        self._rng = rng
        self.num_kept = 0

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        for request, _ in asks:
            if request.prediction is None:
                request.prediction = array("i", self._edited(self._answers(request)))
        found = super().propose(asks)
        assert all(len(draft.token_ids) <= most for draft, (_, most) in zip(found, asks, strict=True))
        return found

    def settled(self, request: Request, num_kept: int) -> None:
        self.num_kept += num_kept

    def _edited(self, answer: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        for token in answer:
            kind = self._rng.randrange(12)
            if kind == 0:
                tokens.append(self._rng.randrange(self._vocab_size))
            if kind != 1:
                tokens.append(self._rng.randrange(self._vocab_size) if kind == 2 else token)
        return tokens


def speculation(proposer: Proposer | None = None, *sources: str, most: int = 4, adaptive: bool = False) -> Speculation:
    """Drafts by `proposer`, or of these sources; all of them are verified unless `adaptive`."""
    config = SpeculationConfig(sources=sources or ("lookup",), max_draft_tokens=most, adaptive=adaptive)
    return Speculation(config, proposer)
