"""What is logged of connections whose peers have proven nothing: a few lines, however many connections there are.

Anybody who reaches the port can make another one: a line for each would let a stranger fill a disk, and bury the rest.
"""

import logging
import threading
import time
from collections.abc import Callable

BURST = 10
EVERY_S = 10.0
"""After the first ones, one line in so long."""
log = logging.getLogger(__name__)


class LineBudget:
    """A token bucket of lines. Pure."""

    def __init__(self, *, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._seen_s: float | None = None
        self._num_left_out = 0

    def spend(self, now_s: float) -> int | None:
        """None: no line. Else how many were left out since the last one."""
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
    """Of one listening socket; on any thread."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: what listens, such as a transport."""
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = LineBudget(burst=BURST, every_s=EVERY_S)

    def record(self, what: str, error: object, *, level: int = logging.INFO) -> None:
        """`what` became of a connection, and why."""
        with self._lock:
            left_out = self._budget.spend(self._clock())
        if left_out is not None:
            more = f"; {left_out} more of such lines were left out" if left_out else ""
            log.log(level, "%s: %s: %s%s", self.name, what, error, more)
