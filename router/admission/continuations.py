"""Which continued streams bypass the queue and the limits: their clients were promised them. Pure.

An id can be sent any number of times, to any router, even for a stream that ended well; a router that no longer has the
stream computes the whole answer again. So a router keeps the promise once per stream, and for as many streams at a time
as it runs requests. Any further continuation waits its turn, within its key's limits, like a new request. All of them
are counted for their key (`router.admission.rate_limits`).
"""

from collections.abc import Callable

from tandem.values.ids import RequestId

_MOST_REMEMBERED = 65_536


class Continuations:
    """The continued streams that one router has let pass."""

    def __init__(self, *, most: int, remembered_s: float, clock: Callable[[], float]) -> None:
        """`most`: at a time, in addition to all other requests; `remembered_s`: how long an id is valid."""
        self._most = most
        self._remembered_s = remembered_s
        self._clock = clock
        # The oldest first.
        self._begun_s: dict[RequestId, float] = {}
        self._num_under_way = 0

    def is_promised(self, stream: RequestId) -> bool:
        """Whether a stream may bypass the queue now."""
        return stream not in self._begun_s and self._num_under_way < self._most

    def on_begin(self, stream: RequestId) -> None:
        now_s = self._clock()
        self._num_under_way += 1
        self._begun_s[stream] = now_s
        while (oldest := next(iter(self._begun_s))) != stream and (
            len(self._begun_s) > _MOST_REMEMBERED or now_s - self._begun_s[oldest] > self._remembered_s
        ):
            del self._begun_s[oldest]

    def ended(self) -> None:
        """Count a stream that had passed as ended."""
        self._num_under_way -= 1
