"""The interface between a grammar and the engine: a guide follows an answer and says which tokens may come next.

A guide is a pure function of its grammar and the tokens accepted, so any worker takes an answer up where another left
it by having a fresh guide follow the tokens that exist.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.errors import InternalError, InvalidRequest, ServingError

if TYPE_CHECKING:  # the scheduler imports this module and needs no numpy
    import numpy as np
    import numpy.typing as npt

Bits: TypeAlias = "npt.NDArray[np.int32]"
"""One bit a token, the lowest first: `[(vocab_size + 31) // 32]`."""


class TokenGuide(Protocol):
    """Follows the grammar of one answer; used by the engine's thread alone once a request has it."""

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete: no token may follow."""

    @property
    def has_refused(self) -> bool:
        """Whether it refused the last token, or gave up because its grammar is too costly to follow."""

    @property
    def is_too_costly(self) -> bool:
        """Whether it refused because its grammar is too costly to follow."""

    def allow(self, bits: Bits) -> None:
        """Set the bits of the tokens that may come next, the end token's included where the answer may end."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False when it may not come next, or the grammar is too costly to follow."""

    def fork(self) -> "TokenGuide":
        """A guide that goes on from here by itself: whatever it follows, this one is as if it had never been made."""

    def forced(self, most: int) -> Sequence[int]:
        """Tokens that are likely to come next because the grammar leaves no choice, at most `most`; changes nothing."""


class Guides(Protocol):
    """Makes guides; may be called from any thread."""

    def cached_guide(self, grammar: str) -> TokenGuide | None:
        """A fresh guide, at once; None when the grammar has to be compiled first."""

    def guide(self, grammar: str) -> TokenGuide:
        """A fresh guide. Raises InvalidRequest for a grammar that cannot be compiled or is too costly to follow.

        May take a second: not for the event loop, nor for the engine's thread.
        """


def unusable(guide: TokenGuide | None) -> ServingError:
    """The error of a request for which no token could be chosen."""
    if guide is not None and guide.is_too_costly:
        return InvalidRequest("grammar: too expensive to evaluate in this answer", param="grammar")
    if guide is not None and guide.has_refused:
        return InvalidRequest("the grammar allows no next token")
    return InternalError("the model's logits are not finite (NaN or infinity)")


def follow(guide: TokenGuide, output: Sequence[int]) -> bool:
    """Make a guide accept the tokens of `output` that it has not seen; False when it refuses one."""
    return all(guide.accept(token_id) for token_id in output[guide.num_tokens :])


def num_acceptable(guide: TokenGuide, drafts: Sequence[int]) -> int:
    """How many of `drafts` may come next one after the other, none of them ending the answer."""
    ahead = guide.fork()
    for count, token_id in enumerate(drafts):
        if not ahead.accept(token_id) or ahead.is_over:
            return count
    return len(drafts)


def num_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask over the vocabulary."""
    return (vocab_size + 31) // 32
