"""Drafts from answers that other requests got: what one client is told is often told again (Oliaro et al., 2024,
"SuffixDecoding").

One cache for each root of a block chain (`Request.hash_root`: model, adapter, tenant salt). So nobody's drafts, and
hence nobody's speed, depend on another tenant's answers, as with the prefix cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.speculation.proposer import NO_DRAFT, Ask, Draft
from engine.speculation.token_history import RUN, TokenHistory
from engine.types.request import Request
from tandem.values.ids import BlockHash

MAX_ROOTS = 32
MAX_TOKENS = 1 << 15
"""Tokens of one generation; a root has two, which take twelve bytes a token."""
_LEAD = 8
"""Tokens of the prompt kept before an answer, by which its beginning is found."""
_SEPARATOR = -1


class _RootHistory:
    """Answers under one root: those of the present generation, and of the one before it."""

    __slots__ = ("generations",)

    def __init__(self) -> None:
        self.generations = [TokenHistory(array("i"))]

    def add(self, tokens: "array[int]") -> None:
        newest = self.generations[0]
        if len(newest.tokens) + len(tokens) >= MAX_TOKENS:
            newest = TokenHistory(array("i"))
            self.generations = [newest, self.generations[0]]
        newest.tokens.extend(tokens)
        newest.tokens.append(_SEPARATOR)
        newest.index(len(tokens) + 1)

    def continuation(self, context: "array[int]", most: int) -> tuple[int, ...]:
        """The tokens that followed the longest match, up to the end of their answer."""
        best, found = 0, array("i")
        for history in self.generations:
            length, follows = history.find(context)
            if length > best:
                best, found = length, history.tokens[follows : follows + most]
        tokens = tuple(found)
        return tokens[: tokens.index(_SEPARATOR)] if _SEPARATOR in tokens else tokens


class SuffixCache:
    """Continues a request as an earlier answer under the same root went on."""

    name = "suffix"

    def __init__(self) -> None:
        self._roots: OrderedDict[BlockHash, _RootHistory] = OrderedDict()

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return [self._draft(request, most) for request, most in asks]

    def settled(self, request: Request, num_kept: int) -> None:
        """Do nothing: answers are added once they are complete."""

    def forget(self, request: Request) -> None:
        """Add the answer of a request that is over, unless it is too short to be found, or longer than the cache."""
        start = max(0, request.num_prompt_tokens - _LEAD)
        tokens = request.token_ids[start:]
        if request.num_output_tokens <= 0 or not RUN < len(tokens) < MAX_TOKENS:
            return
        root = self._roots.get(request.hash_root)
        if root is None:
            root = self._roots[request.hash_root] = _RootHistory()
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        self._roots.move_to_end(request.hash_root)
        root.add(tokens)

    def _draft(self, request: Request, most: int) -> Draft:
        root = self._roots.get(request.hash_root)
        if root is None:
            return NO_DRAFT
        self._roots.move_to_end(request.hash_root)
        # Matches are short beside a long context, of which nothing may be copied.
        tokens = root.continuation(request.token_ids[-64:], most)
        return Draft(tokens, self.name) if tokens else NO_DRAFT
