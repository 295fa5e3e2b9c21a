"""Decides when a late first token justifies a second attempt elsewhere. Pure; off unless configured.

"The Tail at Scale" (Dean and Barroso, CACM 2013): a second request is sent once the first has taken longer than a high
quantile of the usual time, so that few are sent. Here a budget bounds them as well: a cluster that is slow as a whole
must not be sent everything twice.
"""

from collections import deque

_WINDOW = 512
_LEAST_SEEN = 64
_RENEWED_EVERY = 16
_MOST_SAVED = 8.0


class Hedging:
    """Learns how long first tokens take."""

    def __init__(self, *, quantile: float = 0.95, budget: float = 0.05) -> None:
        """`budget`: second attempts per request."""
        self._quantile = quantile
        self._budget = budget
        self._saved = 0.0
        self._seen: deque[float] = deque(maxlen=_WINDOW)
        self._num_since = 0
        self._delay_s: float | None = None
        self.num_started = 0
        self.num_won = 0

    def earn(self) -> None:
        """Count a placed choice, which adds to the budget."""
        self._saved = min(_MOST_SAVED, self._saved + self._budget)

    def observe(self, first_token_s: float) -> None:
        """Record how long after its placement a choice had its first token."""
        self._seen.append(first_token_s)
        self._num_since += 1
        if len(self._seen) >= _LEAST_SEEN and (self._delay_s is None or self._num_since >= _RENEWED_EVERY):
            self._num_since = 0
            self._delay_s = sorted(self._seen)[int(self._quantile * (len(self._seen) - 1))]

    @property
    def delay_s(self) -> float | None:
        """Return the delay before a second attempt; None while too little is known."""
        return self._delay_s

    @property
    def may_begin(self) -> bool:
        """Whether the budget allows a second attempt."""
        return self._saved >= 1.0

    def began(self) -> None:
        """Count a second attempt that was sent to a worker."""
        self._saved -= 1.0
        self.num_started += 1

    def won(self) -> None:
        """Count a second attempt that produced the first token."""
        self.num_won += 1
