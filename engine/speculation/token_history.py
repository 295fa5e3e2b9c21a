"""Finds where the end of a sequence has occurred before: hash chains over runs of tokens, as in LZ77 compressors.

A chain links the positions at which runs of equal hash end, the newest first (Deutsch, RFC 1951, section 4). Adding a
token takes constant time and twelve bytes. A search looks at no more than `MAX_CANDIDATES` positions and compares no
more than `MAX_MATCH` tokens beyond the run in all, however repetitive the text is.
"""

from array import array
from collections.abc import Sequence

RUN = 3
"""Tokens that must be equal before anything counts as a match."""
MAX_MATCH = 32
"""Tokens compared at most; longer matches count as equal."""
MAX_CANDIDATES = 16
_FIRST_SIZE = 256
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""Odd constants with well mixed bits, from xxHash (https://github.com/Cyan4973/xxHash)."""
_SHIFT = 15


class TokenHistory:
    """An index over the tokens of an array that only grows. The array belongs to the caller and is not copied."""

    __slots__ = ("_heads", "_mask", "_previous", "tokens")

    def __init__(self, tokens: "array[int]") -> None:
        self.tokens = tokens
        self._previous = array("i")
        """For each indexed position: the position before it in its chain, -1 at the end."""
        self._resize(len(tokens))

    @property
    def num_indexed(self) -> int:
        """Leading tokens that can be found."""
        return len(self._previous)

    def index(self, most: int) -> bool:
        """Index up to `most` further tokens. Returns whether all tokens are indexed now."""
        tokens, previous = self.tokens, self._previous
        end = len(tokens)
        begin, stop = len(previous), min(end, len(previous) + most)
        if stop > len(self._heads):
            self._resize(end)
            begin, previous = 0, self._previous
        heads, mask = self._heads, self._mask
        first, second, third = _FACTORS
        while begin < min(RUN - 1, stop):
            previous.append(-1)
            begin += 1
        for position in range(begin, stop):
            key = (tokens[position - 2] * first ^ tokens[position - 1] * second ^ tokens[position] * third) >> _SHIFT
            previous.append(heads[key & mask])
            heads[key & mask] = position
        return stop == end

    def find(self, context: "array[int]", before: int | None = None) -> tuple[int, int]:
        """Find the longest match of the context's end: its length, and the position of the token that follows it.

        `before`: ignore matches that end at this position or later. The newest of equally long matches is found; the
        length is 0 where fewer than `RUN` tokens match.
        """
        tokens, end = self.tokens, len(context)
        if end < RUN:
            return 0, 0
        first, second, third = _FACTORS
        key = (context[end - 3] * first ^ context[end - 2] * second ^ context[end - 1] * third) >> _SHIFT
        place = self._heads[key & self._mask]
        while before is not None and place >= before:
            place = self._previous[place]
        length, follows = RUN - 1, 0
        for _ in range(MAX_CANDIDATES):
            if place < 0 or length == MAX_MATCH:
                break
            wanted = length + 1
            # Most candidates fail here: they are not longer than the best so far.
            if place + 1 >= wanted <= end and tokens[place + 1 - wanted : place + 1] == context[end - wanted :]:
                length, most = wanted, min(MAX_MATCH, place + 1, end)
                while length < most and tokens[place - length] == context[end - 1 - length]:
                    length += 1
                follows = place + 1
            place = self._previous[place]
        return (length, follows) if follows else (0, 0)

    def _resize(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens, and as many again; all tokens have to be indexed anew."""
        size = max(_FIRST_SIZE, 1 << (2 * num_tokens - 1).bit_length() if num_tokens else 0)
        self._heads = array("i", [-1]) * size
        self._mask = size - 1
        self._previous = array("i")


def repeated(tokens: "array[int]", follows: int, most: int) -> Sequence[int]:
    """Continue an array as it went on from position `follows`, for `most` tokens.

    Where the continuation reaches the array's end it reads on in itself: a period of p tokens is repeated.
    """
    part = tokens[follows : follows + most]
    if len(part) == most or not part:
        return part
    return (part * (-(-most // len(part))))[:most]
