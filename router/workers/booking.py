"""The load that one attempt puts on a worker, recorded in the session in which it was sent. Pure.

A process whose session broke may be back in a new one before the attempt has ended. The new session's record never
counted the attempt, so it must not be subtracted from it: the sender keeps the booking, and releases exactly that.
"""

from router.workers.record import WorkerRecord


class Booking:
    """One request, and the tokens of it to compute. Every call but `add_tokens` is idempotent."""

    __slots__ = ("_record", "tokens")

    def __init__(self, record: WorkerRecord | None, tokens: int) -> None:
        """`record`: None when the worker has left already."""
        self.tokens = tokens
        """Tokens not known to be computed yet."""
        self._record = record
        if record is not None:
            record.assigned(tokens)

    def add_tokens(self, tokens: int) -> None:
        """Add tokens that the worker has to compute."""
        self.tokens += tokens
        if self._record is not None:
            self._record.add_tokens(tokens)

    def computed(self) -> None:
        """Take the tokens off the backlog: they have been computed, or never will be."""
        tokens, self.tokens = self.tokens, 0
        if tokens and self._record is not None:
            self._record.computed(tokens)

    def end(self) -> None:
        """End the request at this worker."""
        if self.tokens:
            self.computed()
        record, self._record = self._record, None
        if record is not None:
            record.released()
