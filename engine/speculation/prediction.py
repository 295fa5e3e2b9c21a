"""Drafts from the answer that the client expects (OpenAI's `prediction`): mostly a text that it wants edited.

While the answer goes on as the prediction does, the draft is what comes next in it, from its beginning where nothing
has been generated. Where the two part, the answer's last tokens are looked for in the prediction after each step, first
shortly after the place, so that an edit costs a few tokens.

Both are also kept as strings of one character a token: `str.find` compares whole tokens at the speed of C, which takes
a few microseconds where an index of the whole text would take milliseconds to make.
"""

import sys
from array import array
from collections.abc import Sequence

from engine.speculation.proposer import NO_DRAFT, Ask, Draft
from engine.types.request import Request
from tandem.values.step_sizes import PREDICTION_SOURCE

_NEAR = 64
"""Tokens after the place where answer and prediction parted in which few equal tokens count as the same place."""
_NEAR_RUN = 2
_RUN = 3
"""Equal tokens that count as the same place anywhere else."""
_LONG_RUN = 8
"""Equal tokens that are looked for first: text that was moved is found by them, rather than by a common phrase."""
_REACH = 8192
"""Tokens before and after the place in which the answer's end is looked for: bounds the time of a search."""
_SURE = 4
"""Tokens that the answer must follow a place found before later searches begin there."""
_CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


class ClientPrediction:
    """Continues a request as its prediction goes on after the place that the answer has reached."""

    name = PREDICTION_SOURCE

    def __init__(self) -> None:
        self._followers: dict[Request, _Follower] = {}

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return [
            self._draft(request, request.prediction, most) if request.prediction else NO_DRAFT for request, most in asks
        ]

    def settled(self, request: Request, num_kept: int) -> None:
        """Do nothing: the request's tokens say it all."""

    def forget(self, request: Request) -> None:
        self._followers.pop(request, None)

    def _draft(self, request: Request, prediction: "array[int]", most: int) -> Draft:
        follower = self._followers.get(request)
        if follower is None:
            follower = self._followers[request] = _Follower(prediction)
        follower.follow(request)
        tokens = follower.coming(most)
        return Draft(tokens, self.name) if tokens else NO_DRAFT


class _Follower:
    """The place in one prediction that the answer has reached."""

    __slots__ = ("_num_followed", "_num_seen", "_parted_at", "_place", "_text", "_tokens")

    def __init__(self, prediction: "array[int]") -> None:
        self._tokens = prediction
        self._text = _as_text(prediction)
        self._place: int | None = 0
        """Position of the token that should come next; None: the answer is not known to be anywhere in it."""
        self._parted_at = 0
        """Position after the last token that the answer surely followed; searches begin here."""
        self._num_followed = _SURE
        """Tokens that the answer has followed since `_place` was found; at the beginning it need not be proven."""
        self._num_seen = 0
        """Tokens of the answer that have been compared."""

    def coming(self, most: int) -> tuple[int, ...]:
        """The next tokens of the prediction, at most `most`."""
        place = self._place
        return () if place is None else tuple(self._tokens[place : place + most])

    def follow(self, request: Request) -> None:
        """Compare what has been generated since the last call, and look for the place again where it was lost."""
        known, begin = request.token_ids, request.num_prompt_tokens + self._num_seen
        self._num_seen = request.num_output_tokens
        if self._place is not None and begin < len(known):
            self._advance(self._place, known[begin:])
        if self._place is None:
            self._place = self._find(known, request.num_prompt_tokens)
            self._num_followed = 0

    def _advance(self, place: int, new: "array[int]") -> None:
        coming, count = self._tokens[place : place + len(new)], len(new)
        if coming != new:
            pairs = zip(coming, new, strict=False)
            count = next((i for i, (expected, token) in enumerate(pairs) if expected != token), len(coming))
        self._num_followed += count
        if self._num_followed >= _SURE:
            self._parted_at = place + count
        self._place = place + count if count == len(new) else None

    def _find(self, known: "array[int]", num_prompt_tokens: int) -> int | None:
        """Find where the prediction goes on after the answer's last tokens; None where too few of them are in it."""
        end = _as_text(known[max(num_prompt_tokens, len(known) - _LONG_RUN) :])
        text, begin = self._text, self._parted_at
        for length, after in ((_NEAR_RUN, _NEAR), (_LONG_RUN, _REACH), (_RUN, _REACH)):
            if length > len(end):
                continue
            wanted = end[-length:]
            place = text.find(wanted, begin, begin + after)
            if place < 0 and after == _REACH:
                place = text.rfind(wanted, max(0, begin - _REACH), begin + length)
            if place >= 0:
                return place + length
        return None


def _as_text(tokens: "array[int]") -> str:
    """One character for each token; empty where a token is beyond Unicode: no vocabulary in use is that large."""
    try:
        return tokens.tobytes().decode(_CODEC, "surrogatepass")
    except UnicodeDecodeError:
        return ""
