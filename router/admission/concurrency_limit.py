"""How many requests the router accepts at once, and what it tells those it turns away."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.errors import Overloaded, Unavailable

_SMOOTHING = 0.2
_SUCCESSOR_S = 1.0


class Admission:
    """Counts requests accepted and not yet answered; bounded, so that overload is refused before work is wasted."""

    def __init__(
        self, *, max_inflight: int, clock: Callable[[], float], background_share: float = 0.75, prior_s: float = 1.0
    ) -> None:
        """Requests of positive priority (later than normal) may fill only `background_share` of the places.

        `prior_s` stands for a request's duration until one has ended.
        """
        self._max_inflight = max_inflight
        self._max_background = max(1, int(max_inflight * background_share))
        self._clock = clock
        self._mean_duration_s = prior_s
        self._num_turned_away = 0
        self._closed = False
        self.num_inflight = 0

    def num_free(self, priority: int) -> int:
        """Places that a request of that priority could have now; below 0 when others hold its share."""
        return (self._max_background if priority > 0 else self._max_inflight) - self.num_inflight

    @contextmanager
    def admit(self, priority: int, *, promised: bool = False) -> Iterator[None]:
        """Hold one place while inside. Raises Overloaded with the predicted time until a place is free.

        Raises Unavailable once closed: another router, or this one's successor, will answer. `promised`: a stream that
        goes on has a place whatever is free; the gate bounds their number.
        """
        if self._closed:
            raise Unavailable("the router is draining", retry_after_s=_SUCCESSOR_S)
        if not promised and self.num_free(priority) <= 0:
            self._num_turned_away += 1
            raise Overloaded(f"{self.num_inflight} requests are in flight", retry_after_s=self.retry_after_s())
        started_s = self._clock()
        self.num_inflight += 1
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._num_turned_away = max(0, self._num_turned_away - 1)
            self._mean_duration_s += _SMOOTHING * (self._clock() - started_s - self._mean_duration_s)

    def close(self) -> None:
        """Accept nothing any more."""
        self._closed = True

    def retry_after_s(self) -> float:
        """Time in which as many places come free as were turned away since, between 0.1 s and a minute."""
        per_place_s = self._mean_duration_s / self._max_inflight
        return min(60.0, max(0.1, per_place_s * self._num_turned_away))
