"""Rate-limited log of refused connections, whose peers are not authenticated.

Anyone who can reach the port can connect: with one line per connection a stranger could fill the disk, or hide
everything else.
"""

import logging
import threading
import time
from collections.abc import Callable

BURST = 10
EVERY_S = 10.0
"""Seconds per line once the burst is used up."""
log = logging.getLogger(__name__)


class LineBudget:
    """Token bucket of log lines. Pure."""

    def __init__(self, *, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._seen_s: float | None = None
        self._num_left_out = 0

    def spend(self, now_s: float) -> int | None:
        """Spend one line; returns the number of lines left out since the last one, or None when this one must be left
        out."""
        if self._seen_s is not None:
            self._left = min(float(self._burst), self._left + (now_s - self._seen_s) / self._every_s)
        self._seen_s = now_s
        if self._left < 1.0:
            self._num_left_out += 1
            return None
        self._left -= 1.0
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


class RefusalLog:
    """Logs the refusals at one listening socket. Thread-safe."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: of the transport, the prefix of each line."""
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = LineBudget(burst=BURST, every_s=EVERY_S)

    def record(self, what: str, error: object, *, level: int = logging.INFO) -> None:
        """Log `what` happened to a connection, and the error that caused it."""
        with self._lock:
            left_out = self._budget.spend(self._clock())
        if left_out is not None:
            more = f"; {left_out} earlier lines like this were left out" if left_out else ""
            log.log(level, "%s: %s: %s%s", self.name, what, error, more)
