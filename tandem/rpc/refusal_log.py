"""Logs refused connections at a bounded rate.

Anybody who reaches the port can open another one: with a line for each, a stranger could fill a disk and bury the rest.
"""

import logging
import threading
import time
from collections.abc import Callable

BURST = 10
EVERY_S = 10.0
"""Time per line after the first BURST lines."""
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
        """Return how many lines were left out since the last one, or None if this one is left out, too."""
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
    """Log of the refused connections of one listening socket. Thread-safe."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: what listens, such as a transport."""
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = LineBudget(burst=BURST, every_s=EVERY_S)

    def record(self, what: str, error: object, *, level: int = logging.INFO) -> None:
        """Log what became of a connection, and why, or count the line as left out."""
        with self._lock:
            left_out = self._budget.spend(self._clock())
        if left_out is not None:
            more = f"; {left_out} earlier lines like this were left out" if left_out else ""
            log.log(level, "%s: %s: %s%s", self.name, what, error, more)
