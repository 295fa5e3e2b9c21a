"""Detects that a peer that should send often has been silent for too long."""


class SilenceWatch:
    """Measures a peer's silence, excluding time in which this process itself did not run. Pure."""

    def __init__(self, *, silence_s: float, period_s: float, now_s: float) -> None:
        """`period_s`: intended period of calls of `is_silent`."""
        self._silence_s = silence_s
        self._period_s = period_s
        self._heard_s = self._checked_s = now_s

    def on_message(self, now_s: float) -> None:
        """Record a message from the peer."""
        self._heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether the peer sent nothing for `silence_s` of this process's own running time."""
        stalled_s = now_s - self._checked_s - 2 * self._period_s
        self._checked_s = now_s
        if stalled_s > 0.0:
            # Its messages may wait to be read: extend the peer's time by as long as this process stalled.
            self._heard_s += stalled_s
        return now_s - self._heard_s >= self._silence_s
