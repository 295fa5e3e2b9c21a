"""Requests in the one order that scheduling, preemption and fairness share: priority, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request
from tandem.errors import InvariantError
from tandem.ids import RequestId

Rank = tuple[int, float, RequestId]


def rank(request: Request) -> Rank:
    """Sort key, smaller is sooner. Total and constant for a request's life, so preemption cannot go in circles."""
    return (request.priority, request.arrival_s, request.request_id)


class RequestQueue:
    """A list kept in rank order: O(log n) to find; a removal moves pointers only."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
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
        """Insert by rank."""
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take out a request that is here."""
        index = bisect_left(self._requests, rank(request), key=rank)
        if index == len(self._requests) or self._requests[index] is not request:
            raise InvariantError(f"request {request.request_id} is not in this queue")
        del self._requests[index]
