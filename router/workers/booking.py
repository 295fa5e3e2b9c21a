"""What one attempt has at one worker, in the books of the session in which it was sent there. Pure.

A process whose session broke may be back in a new one before the attempt has ended. The new session's books know
nothing of it, so it must not be taken from them: whoever sends something keeps the booking, and gives that back.
"""

from router.workers.record import WorkerRecord


class Booking:
    """One request, and tokens of it to compute. Every call but `owes` may come again, and then does nothing."""

    __slots__ = ("_record", "tokens")

    def __init__(self, record: WorkerRecord | None, tokens: int) -> None:
        """None: the worker had left when it was sent."""
        self.tokens = tokens
        """Not known to be computed yet."""
        self._record = record
        if record is not None:
            record.assigned(tokens)

    def owes(self, tokens: int) -> None:
        """More is to be computed there than was sent at first."""
        self.tokens += tokens
        if self._record is not None:
            self._record.owes(tokens)

    def computed(self) -> None:
        """All of it has been computed, or never will be."""
        tokens, self.tokens = self.tokens, 0
        if tokens and self._record is not None:
            self._record.computed(tokens)

    def end(self) -> None:
        """The request is over there."""
        self.computed()
        record, self._record = self._record, None
        if record is not None:
            record.released()
