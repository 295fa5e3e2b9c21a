"""Answered requests of a simulation, as columns: a hundred bytes per request instead of a thousand."""

from array import array
from collections.abc import Iterator
from math import isnan, nan
from typing import NamedTuple

from cluster.simulator.inputs.trace import TraceRequest
from cluster.simulator.model.request import SimRequest


class FinishedRequest(NamedTuple):
    """Result of one answered request."""

    number: int
    """Position in order of arrival."""
    wanted: TraceRequest
    arrived_s: float
    queued_s: float | None
    """Time from arrival at the router until computation of the prompt started."""
    first_token_s: float | None
    finished_s: float
    cached_tokens: int | None
    """Cached prompt tokens that the first worker found when it started the prompt."""
    num_output_tokens: int
    """Tokens that the client had when the last attempt started: 0 unless a worker was lost."""


def ttft_s(request: FinishedRequest) -> float:
    """Return the seconds to the first token."""
    return (request.finished_s if request.first_token_s is None else request.first_token_s) - request.arrived_s


class FinishedRequests:
    """All answered requests, in order of their ends."""

    __slots__ = ("_arrived_s", "_cached", "_finished_s", "_first_s", "_numbers", "_queued_s", "_resumed", "_wanted")

    def __init__(self) -> None:
        self._numbers = array("q")
        self._wanted: list[TraceRequest] = []
        self._arrived_s, self._finished_s = array("d"), array("d")
        self._resumed = array("q")
        # NaN stands for unknown values.
        self._queued_s, self._first_s, self._cached = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[FinishedRequest]:
        return map(self.__getitem__, range(len(self)))

    def add(self, request: SimRequest, finished_s: float) -> None:
        """Add a request; nothing of the object itself is kept."""
        self._numbers.append(request.number)
        self._wanted.append(request.wanted)
        self._arrived_s.append(request.arrived_s)
        self._finished_s.append(finished_s)
        self._resumed.append(request.num_output_tokens)
        self._queued_s.append(nan if request.queued_s is None else request.queued_s)
        self._first_s.append(nan if request.first_token_s is None else request.first_token_s)
        self._cached.append(nan if request.cached_tokens is None else request.cached_tokens)

    def in_order(self) -> Iterator[FinishedRequest]:
        return map(self.__getitem__, sorted(range(len(self)), key=self._numbers.__getitem__))

    def __getitem__(self, index: int) -> FinishedRequest:
        cached = _known(self._cached[index])
        return FinishedRequest(
            number=self._numbers[index],
            wanted=self._wanted[index],
            arrived_s=self._arrived_s[index],
            queued_s=_known(self._queued_s[index]),
            first_token_s=_known(self._first_s[index]),
            finished_s=self._finished_s[index],
            cached_tokens=None if cached is None else int(cached),
            num_output_tokens=self._resumed[index],
        )


def _known(value: float) -> float | None:
    return None if isnan(value) else value
