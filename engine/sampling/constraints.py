"""Constraints that need no grammar: allowed tokens, banned sequences; and several guides at once."""

from collections.abc import Sequence
from copy import copy

import numpy as np

from engine.types.token_guide import Bits, TokenGuide, follow, num_words

_ALL = np.int32(-1)


class AllowedTokens:
    """Allows only the given tokens. Implements TokenGuide."""

    is_over = False
    is_too_costly = False

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        flags = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
        flags[list(token_ids)] = 1
        self._bits = np.packbits(flags, bitorder="little").view(np.int32)
        self._allowed = frozenset(token_ids)
        self.num_tokens = 0
        self.has_refused = False

    def allow(self, bits: Bits) -> None:
        bits[:] = self._bits

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        self.has_refused = token_id not in self._allowed
        return not self.has_refused

    def fork(self) -> "AllowedTokens":
        return copy(self)

    def forced(self, most: int) -> Sequence[int]:
        return [*self._allowed] * most if len(self._allowed) == 1 else ()


class BannedSequences:
    """Bans the last token of a sequence whose other tokens have just come. Implements TokenGuide."""

    is_over = False
    is_too_costly = False

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._endings: dict[tuple[int, ...], set[int]] = {}
        for *before, last in sequences:
            self._endings.setdefault(tuple(before), set()).add(last)
        self._lengths = sorted({len(before) for before in self._endings})
        self._recent: list[int] = []
        self.num_tokens = 0
        self.has_refused = False

    def allow(self, bits: Bits) -> None:
        bits[:] = _ALL
        for token_id in self._banned():
            bits[token_id // 32] &= ~np.left_shift(np.int32(1), np.int32(token_id % 32))

    def accept(self, token_id: int) -> bool:
        self.has_refused = token_id in self._banned()
        self._recent.append(token_id)
        del self._recent[: len(self._recent) - self._lengths[-1]]
        self.num_tokens += 1
        return not self.has_refused

    def fork(self) -> "BannedSequences":
        ahead = copy(self)
        ahead._recent = self._recent.copy()
        return ahead

    def forced(self, most: int) -> Sequence[int]:
        return ()

    def _banned(self) -> set[int]:
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(self._recent):
                found |= self._endings.get(tuple(self._recent[len(self._recent) - length :]), set())
        return found


class AllOf:
    """Allows the tokens that all of several guides allow. Implements TokenGuide."""

    def __init__(self, guides: Sequence[TokenGuide]) -> None:
        self._guides = guides
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        return any(guide.is_over for guide in self._guides)

    @property
    def has_refused(self) -> bool:
        return any(guide.has_refused for guide in self._guides)

    @property
    def is_too_costly(self) -> bool:
        return any(guide.is_too_costly for guide in self._guides)

    def allow(self, bits: Bits) -> None:
        bits[:] = _ALL
        own = np.zeros_like(bits)
        for guide in self._guides:
            guide.allow(own)
            bits &= own

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        return all([guide.accept(token_id) for guide in self._guides])

    def fork(self) -> "AllOf":
        ahead = AllOf([guide.fork() for guide in self._guides])
        ahead.num_tokens = self.num_tokens
        return ahead

    def forced(self, most: int) -> Sequence[int]:
        """See TokenGuide: those of the first guide that forces any, whatever the others allow."""
        return next((tokens for guide in self._guides if (tokens := guide.forced(most))), ())


def catch_up(guide: TokenGuide, output: Sequence[int], vocab_size: int) -> None:
    """Make a guide follow an answer that is continued here, and compute the next mask: slow for a grammar.

    A refusal is left to the engine, which ends the answer.
    """
    if follow(guide, output) and not guide.is_over:
        guide.allow(np.zeros(num_words(vocab_size), dtype=np.int32))
