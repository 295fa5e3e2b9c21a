"""A virtual clock and what is to happen on it, in order of time and, at one time, of entering. Nothing waits."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """All that is going to happen in one simulation."""

    __slots__ = ("_heap", "_is_stopped", "_num_foreground", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation's start."""
        self._heap: list[tuple[float, int, Action, bool]] = []
        self._serial = 0
        self._num_foreground = 0
        self._is_stopped = False

    def clock(self) -> float:
        """The time, for objects that ask."""
        return self.now

    def at(self, time_s: float, action: Action) -> None:
        """Do something then; what should have happened before now happens next."""
        self._num_foreground += 1
        self._push(time_s, action, True)

    def after(self, delay_s: float, action: Action) -> None:
        """Do something so much later."""
        self.at(self.now + delay_s, action)

    def in_background(self, delay_s: float, action: Action) -> None:
        """Do something so much later, if by then something else is still going to happen."""
        self._push(self.now + delay_s, action, False)

    def run(self) -> None:
        """Let everything happen until `stop`, or until nothing is left."""
        heap, pop = self._heap, heapq.heappop
        self._is_stopped = False
        while self._num_foreground and not self._is_stopped:
            self.now, _, action, is_foreground = pop(heap)
            self._num_foreground -= is_foreground
            action()

    def stop(self) -> None:
        """What happens now is the last."""
        self._is_stopped = True

    def _push(self, time_s: float, action: Action, is_foreground: bool) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._serial, action, is_foreground))
