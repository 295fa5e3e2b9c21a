"""Drafts that somebody has stated: tokens that a client predicts, and tokens that a grammar leaves no choice about."""

from array import array
from collections.abc import Sequence

from engine.speculation.proposer import NO_DRAFT, Ask, Draft
from engine.speculation.token_history import TokenHistory
from engine.types.request import Request


class _Place:
    """Where an answer is in its prediction."""

    __slots__ = ("at", "history", "num_seen")

    def __init__(self, prediction: "array[int]") -> None:
        self.history = TokenHistory(prediction)
        self.at: int | None = 0
        """Next token of the prediction; None while the answer goes its own way."""
        self.num_seen = 0
        """Tokens of the output that have been compared."""


class PredictedOutput:
    """Continues an answer as the client's prediction goes on (`Request.prediction`; OpenAI's "predicted outputs").

    An answer that has left the prediction is found in it again by its last tokens.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._places: dict[Request, _Place] = {}

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return [
            NO_DRAFT if request.prediction is None else self._draft(request, request.prediction, most)
            for request, most in asks
        ]

    def settled(self, request: Request, num_kept: int) -> None:
        """Do nothing: the answer is compared with its prediction when the next draft is wanted."""

    def forget(self, request: Request) -> None:
        self._places.pop(request, None)

    def _draft(self, request: Request, prediction: "array[int]", most: int) -> Draft:
        place = self._places.get(request)
        if place is None:
            place = self._places[request] = _Place(prediction)
            place.history.index(len(prediction))
        self._follow(place, request)
        if place.at is None:
            return NO_DRAFT
        tokens = tuple(prediction[place.at : place.at + most])
        return Draft(tokens, self.name) if tokens else NO_DRAFT

    @staticmethod
    def _follow(place: _Place, request: Request) -> None:
        prediction = place.history.tokens
        fresh = request.token_ids[request.num_prompt_tokens + place.num_seen :]
        place.num_seen += len(fresh)
        if place.at is not None and prediction[place.at : place.at + len(fresh)] == fresh:
            place.at += len(fresh)
        elif fresh or place.at is None:
            length, follows = place.history.find(request.token_ids)
            place.at = follows if length else None


class ForcedTokens:
    """Tokens that the request's grammar forces; see `TokenGuide.forced`."""

    name = "grammar"

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return [self._draft(request, most) for request, most in asks]

    def settled(self, request: Request, num_kept: int) -> None:
        """Do nothing: nothing is remembered."""

    def forget(self, request: Request) -> None:
        """Do nothing: nothing is remembered."""

    def _draft(self, request: Request, most: int) -> Draft:
        tokens = () if request.guide is None else tuple(request.guide.forced(most))
        return Draft(tokens, self.name) if tokens else NO_DRAFT
