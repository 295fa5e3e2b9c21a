"""What routers have been told of one answer: kept with its task, so that another router can take the stream over."""

from array import array
from collections.abc import Sequence

from tandem.protocol.wire import logprobs_to_pb
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import SampledToken


class ToldTokens:
    """An answer's tokens from its first one. Four bytes each, and their logprobs only if the request asked for them."""

    __slots__ = ("_ids", "_measured", "_num_given")

    def __init__(self, given: Sequence[int]) -> None:
        """`given`: output of earlier attempts, which came with the order and so without logprobs."""
        self._ids = array("i", given)
        self._num_given = len(given)
        self._measured: list[SampledToken] = []

    def add(self, token: SampledToken) -> None:
        """The next token."""
        self._ids.append(token.token_id)
        if token.logprob is not None:
            self._measured.append(token)

    def can_tell_from(self, index: int, *, with_logprobs: bool) -> bool:
        """Whether nothing is missing for a client that has the first `index` tokens."""
        return index <= len(self._ids) and (index >= self._num_given or not with_logprobs)

    def delta(self, request_id: str, attempt: int) -> pb.TokenDelta:
        """All of them."""
        delta = pb.TokenDelta(request_id=request_id, attempt=attempt, first_index=0, token_ids=self._ids)
        if self._measured:
            nothing = [common.Logprobs()] * self._num_given
            delta.logprobs.extend([*nothing, *(found for t in self._measured if (found := logprobs_to_pb(t)))])
        return delta
