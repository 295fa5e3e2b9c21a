"""Drafts of tokens that a grammar leaves no choice about: JSON's punctuation, the names of required properties."""

from collections.abc import Sequence

from engine.speculation.proposer import NO_DRAFT, Ask, Draft
from engine.types.request import Request


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
