"""The interface between a grammar and the engine: a guide follows an answer and says which tokens may come next.

A guide is a pure function of its grammar and the tokens accepted, so any worker takes an answer up where another left
it by having a fresh guide follow the tokens that exist.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.errors import InternalError, InvalidRequest, ServingError

if TYPE_CHECKING:  # whoever decides what runs next needs no numpy
    import numpy as np
    import numpy.typing as npt

Bits: TypeAlias = "npt.NDArray[np.int32]"
"""One bit a token, the lowest first: `[(vocab_size + 31) // 32]`."""


class TokenGuide(Protocol):
    """Of one answer; used by the engine's thread alone once a request has it."""

    @property
    def num_tokens(self) -> int:
        """How many it has accepted."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole and nothing may follow it."""

    @property
    def has_refused(self) -> bool:
        """Whether it did not accept the last token, or its grammar turned out to take too much to follow."""

    @property
    def takes_too_much(self) -> bool:
        """Whether that was because of what its grammar takes to follow."""

    def allow(self, bits: Bits) -> None:
        """Set the bits of the tokens that may come next, the end token among them where the answer may end."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False when it may not come next, or the grammar takes too much to follow."""


class Guides(Protocol):
    """Makes guides; any thread may call."""

    def kept(self, grammar: str) -> TokenGuide | None:
        """One that has accepted nothing, at once; None when the grammar is to be compiled first."""

    def guide(self, grammar: str) -> TokenGuide:
        """One that has accepted nothing. Raises InvalidRequest for what cannot be compiled or takes too much to follow.

        May take a second: not for the event loop, nor for the engine's thread.
        """


def unusable(guide: TokenGuide | None) -> ServingError:
    """Why no token could be chosen for a request."""
    if guide is not None and guide.takes_too_much:
        return InvalidRequest("grammar: this answer has come to take too much to follow", param="grammar")
    if guide is not None and guide.has_refused:
        return InvalidRequest("the grammar allows no next token")
    return InternalError("the model's logits are not finite (NaN or infinity)")


def follow(guide: TokenGuide, output: Sequence[int]) -> bool:
    """Have a guide accept what it has not of an answer's tokens; False when one of them may not stand there."""
    return all(guide.accept(token_id) for token_id in output[guide.num_tokens :])


def num_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask over the vocabulary."""
    return (vocab_size + 31) // 32
