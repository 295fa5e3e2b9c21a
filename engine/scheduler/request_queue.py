"""Orders requests by a single rank, used for scheduling, preemption and fairness alike.

Within a priority, the earliest deadline goes first; a request with no deadline, or a late one, counts as due
`PATIENCE_S` after its arrival. So only those that arrive within that time can ever go before it, and it cannot starve
behind a stream of urgent ones. Across priorities either the level alone decides, or levels age: then a level is worth
a fixed number of seconds, which keeps every request's place constant and lets the lowest level advance, too.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.types.request import Request
from tandem.errors import InvariantError
from tandem.values.ids import RequestId

PATIENCE_S = 30.0

Rank = tuple[int, float, float, RequestId]
"""Level, due time, arrival and id of a request; smaller goes first."""


class Ranking:
    """Gives every request its rank: total and constant for its life, so preemption cannot go in circles."""

    __slots__ = ("_aging_s",)

    def __init__(self, aging_s: float | None) -> None:
        """`aging_s`: seconds that one priority level is worth; None makes levels strict."""
        self._aging_s = aging_s

    def __call__(self, request: Request) -> Rank:
        """Sort key of a request; smaller goes first."""
        due_s = request.arrival_s + PATIENCE_S
        if request.deadline_s is not None and request.deadline_s < due_s:
            due_s = request.deadline_s
        if self._aging_s is None:
            return (request.priority, due_s, request.arrival_s, request.request_id)
        return (0, due_s + request.priority * self._aging_s, request.arrival_s, request.request_id)


class RequestQueue:
    """A list kept in rank order: O(log n) to find; a removal moves pointers only."""

    __slots__ = ("_requests", "rank")

    def __init__(self, rank: Ranking) -> None:
        self.rank = rank
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def first(self) -> Request:
        """The request that goes next; IndexError when empty."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self.rank)

    def remove(self, request: Request) -> None:
        """Remove a queued request. InvariantError when it is not here."""
        index = bisect_left(self._requests, self.rank(request), key=self.rank)
        if index == len(self._requests) or self._requests[index] is not request:
            raise InvariantError(f"request {request.request_id} is not in this queue")
        del self._requests[index]


class Deadlines:
    """Deadlines of waiting requests, soonest first; a request that no longer waits is not kept alive."""

    __slots__ = ("_heap", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Request] = {}
        # Includes some that no longer wait: skipping them later costs less than finding them in the middle.
        self._heap: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        """Entries kept, including those of requests that no longer wait."""
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Watch a waiting request; one without a deadline waits for ever."""
        if request.deadline_s is not None:
            self._waiting[request.request_id] = request
            heapq.heappush(self._heap, (request.deadline_s, request.request_id))

    def forget(self, request: Request) -> None:
        """Stop watching a request. O(1) on average."""
        if self._waiting.pop(request.request_id, None) is not None and len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [item for item in self._heap if item[1] in self._waiting]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed while they waited; each is returned once."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._heap)
            request = self._waiting.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                del self._waiting[request_id]
                late.append(request)
        return late
