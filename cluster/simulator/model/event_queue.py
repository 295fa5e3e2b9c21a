"""A virtual clock and its future events, in order of time and then of insertion. Nothing ever sleeps."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Future events of one simulation."""

    __slots__ = ("_heap", "_is_stopped", "_num_foreground", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation's start."""
        self._heap: list[tuple[float, int, Action, bool]] = []
        self._serial = 0
        self._num_foreground = 0
        self._is_stopped = False

    def clock(self) -> float:
        """Return the present time, for objects that take a clock."""
        return self.now

    def at(self, time_s: float, action: Action) -> None:
        """Schedule an action at a time; if that is past, it happens next."""
        self._num_foreground += 1
        self._push(time_s, action, True)

    def after(self, delay_s: float, action: Action) -> None:
        """Schedule an action after a delay."""
        self.at(self.now + delay_s, action)

    def in_background(self, delay_s: float, action: Action) -> None:
        """Schedule an action after a delay, unless no other events are left by then."""
        self._push(self.now + delay_s, action, False)

    def run(self) -> None:
        """Process events until `stop` is called or none is left."""
        heap, pop = self._heap, heapq.heappop
        self._is_stopped = False
        while self._num_foreground and not self._is_stopped:
            self.now, _, action, is_foreground = pop(heap)
            self._num_foreground -= is_foreground
            action()

    def stop(self) -> None:
        """Stop after the present event."""
        self._is_stopped = True

    def _push(self, time_s: float, action: Action, is_foreground: bool) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._serial, action, is_foreground))
