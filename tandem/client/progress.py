"""One streamed answer across several connections: which request to send next, and when. Pure.

A broken stream is resumed after the last piece received if its pieces have ids; before the first piece the request is
simply sent again. Routers are tried in turn. The limit counts consecutive attempts without progress.
"""

from dataclasses import dataclass
from random import Random

from tandem.client.answers import Piece, piece_of
from tandem.errors import ServingError
from tandem.v1 import inference_pb2 as pb

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A retry: after `wait_s` seconds, and at the next router or the same one."""

    wait_s: float
    next_router: bool


class StreamProgress:
    """Progress of one call over all its attempts."""

    def __init__(self, request: pb.GenerateRequest, *, max_reconnects: int, rng: Random) -> None:
        self._request = request
        self._most = max_reconnects
        self._rng = rng
        self._num_failed = 0
        self._has_begun = False
        self.is_over = False
        """Whether the last message has come: a connection that breaks now does no harm."""

    def request(self) -> pb.GenerateRequest:
        """The request for the next attempt."""
        return self._request

    def on_message(self, message: pb.GenerateResponse) -> Piece:
        self._num_failed = 0
        self._has_begun = True
        if message.stream_id:
            self._request.last_stream_id = message.stream_id
        self.is_over = self.is_over or message.HasField("usage")
        return piece_of(message)

    def after(self, error: ServingError, *, from_server: bool) -> Again | None:
        """The retry after an error; None when the caller gets the error.

        A broken connection is always retried. A server's error is final, unless it is a retryable one of a stream that
        had begun.
        """
        if self._num_failed >= self._most or (from_server and not (self._has_begun and error.retryable)):
            return None
        if self._has_begun and not self._request.last_stream_id:
            return None  # the tokens received so far would be sent again
        self._num_failed += 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._num_failed - 1)) * self._rng.uniform(0.5, 1.0)
        return Again(wait_s=max(wait_s, error.retry_after_s or 0.0), next_router=True)
