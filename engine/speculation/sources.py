"""The sources of drafts that the settings name: what a grammar forces, what the client expects, what is repeated.

Prompt lookup takes the request's own text, prompt and output, to be repeated (Saxena, 2023, "Prompt Lookup Decoding"):
in edits, summaries, code and answers that quote. The suffix cache does so with earlier answers.
"""

from collections.abc import Callable, Sequence

from engine.speculation.prediction import ClientPrediction
from engine.speculation.proposer import NO_DRAFT, Ask, Draft, Proposer
from engine.speculation.suffix_cache import SuffixCache
from engine.speculation.token_history import TokenHistory, repeated
from engine.types.request import Request

_MAX_INDEXED = 2048
"""Tokens of a long prompt that are indexed in one step, which takes about a millisecond."""


class ForcedTokens:
    """Tokens that the request's grammar leaves no choice about; see `TokenGuide.forced`."""

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


class PromptLookup:
    """Continues a request as it went on after the longest earlier match of its last tokens."""

    name = "lookup"

    def __init__(self) -> None:
        self._histories: dict[Request, TokenHistory] = {}

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return [self._draft(request, most) for request, most in asks]

    def settled(self, request: Request, num_kept: int) -> None:
        """Do nothing: the request's tokens say it all."""

    def forget(self, request: Request) -> None:
        self._histories.pop(request, None)

    def _draft(self, request: Request, most: int) -> Draft:
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = TokenHistory(request.token_ids)
        if not history.index(_MAX_INDEXED):
            return NO_DRAFT
        length, follows = history.find(history.tokens, before=len(history.tokens) - 1)
        return Draft(tuple(repeated(history.tokens, follows, most)), self.name) if length else NO_DRAFT


SOURCES: dict[str, Callable[[], Proposer]] = {
    ForcedTokens.name: ForcedTokens,
    ClientPrediction.name: ClientPrediction,
    PromptLookup.name: PromptLookup,
    SuffixCache.name: SuffixCache,
}
"""Sources by name; the names are `tandem.values.step_sizes.DRAFT_SOURCES`."""
