"""When a peer that should speak often has been silent for too long."""


class SilenceWatch:
    """Asked regularly. Time in which this process itself did not run counts as nobody's silence. Without I/O."""

    def __init__(self, *, silence_s: float, period_s: float, now_s: float) -> None:
        """`period_s`: how often `is_silent` is meant to be asked."""
        self._silence_s = silence_s
        self._period_s = period_s
        self._heard_s = self._asked_s = now_s

    def heard(self, now_s: float) -> None:
        """The peer said something."""
        self._heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether it said nothing for `silence_s` of this process's own running time."""
        stalled_s = now_s - self._asked_s - 2 * self._period_s
        self._asked_s = now_s
        if stalled_s > 0.0:
            # What came meanwhile waits to be read: the peer gets as long again as we were away.
            self._heard_s += stalled_s
        return now_s - self._heard_s >= self._silence_s
