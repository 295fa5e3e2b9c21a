"""Which continued streams pass the queue and the limits: they were promised to their clients. Pure.

An id can be sent any number of times, to any router, also of a stream that ended well; who has it no more computes the
whole answer again. So a router keeps the promise once for each stream, and for as many streams at a time as it runs
requests. Whatever comes besides takes its turn, within its key's limits, like a request that is new. All of them are
counted for their key (`router.admission.rate_limits`).
"""

from collections.abc import Callable

from tandem.values.ids import RequestId

_MOST_REMEMBERED = 65_536


class Continuations:
    """Streams that one router has let pass."""

    def __init__(self, *, most: int, remembered_s: float, clock: Callable[[], float]) -> None:
        """`most`: at a time, beside all others; `remembered_s`: for how long an id is good."""
        self._most = most
        self._remembered_s = remembered_s
        self._clock = clock
        # The oldest first.
        self._begun_s: dict[RequestId, float] = {}
        self._num_under_way = 0

    def is_promised(self, stream: RequestId) -> bool:
        """Whether a stream passes now."""
        return stream not in self._begun_s and self._num_under_way < self._most

    def begun(self, stream: RequestId) -> None:
        now_s = self._clock()
        self._num_under_way += 1
        self._begun_s[stream] = now_s
        while (oldest := next(iter(self._begun_s))) != stream and (
            len(self._begun_s) > _MOST_REMEMBERED or now_s - self._begun_s[oldest] > self._remembered_s
        ):
            del self._begun_s[oldest]

    def ended(self) -> None:
        """Count one that had passed as over."""
        self._num_under_way -= 1
