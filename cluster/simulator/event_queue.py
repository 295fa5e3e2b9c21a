"""A virtual clock and what is to happen on it, in order of time and, at one time, of entering. Nothing waits."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """All that is going to happen in one simulation."""

    __slots__ = ("_heap", "_num_foreground", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation's start."""
        self._heap: list[tuple[float, int, Action, bool]] = []
        self._serial = 0
        self._num_foreground = 0

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

    def run(self, until: Callable[[], bool]) -> None:
        """Let everything happen until `until` says that it is enough, asked after each event, or nothing is left."""
        heap = self._heap
        while self._num_foreground:
            self.now, _, action, is_foreground = heapq.heappop(heap)
            self._num_foreground -= is_foreground
            action()
            if until():
                return

    def _push(self, time_s: float, action: Action, is_foreground: bool) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._serial, action, is_foreground))
