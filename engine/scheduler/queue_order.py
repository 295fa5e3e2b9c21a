"""Selects the next request to leave the queue: by rank, but a cached prefix may overtake a bounded number of times.

A prefix that is cached now may be evicted by the time its turn comes, so within one priority the request with the
most cached tokens among the first `WINDOW` goes first (cf. longest prefix match in SGLang, Zheng et al., 2024). The
bound: no request is ever overtaken in this way by more than `max_overtakes` others, in its whole life.

Requests that wait for another's blocks (`engine.scheduler.shared_prefills`), or for a disk
(`engine.kv_cache.tiers.cache`), are skipped meanwhile.
"""

from dataclasses import dataclass
from itertools import islice

from engine.kv_cache.block_manager import BlockManager, PrefixMatch
from engine.kv_cache.tiers.cache import CacheTiers
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.shared_prefills import SharedPrefills
from engine.types.request import Request
from tandem.values.ids import RequestId

WINDOW = 8
"""Number of requests whose prefixes are compared."""
_REACH = 32
"""Number of requests examined, those that wait for another's blocks included: bounds the cost of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCandidate:
    """A waiting request and its cached prefix."""

    request: Request
    match: PrefixMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueChoice:
    """The queue's head, the request that should go first, and those that it overtakes."""

    head: QueueCandidate
    best: QueueCandidate
    overtaken: tuple[Request, ...]


class QueueOrder:
    """Chooses from a waiting queue and counts how often each request was overtaken."""

    def __init__(
        self,
        waiting: RequestQueue,
        blocks: BlockManager,
        in_flight: SharedPrefills,
        *,
        max_overtakes: int,
        tiers: CacheTiers | None = None,
    ) -> None:
        self._waiting = waiting
        self._blocks = blocks
        self._in_flight = in_flight
        self._tiers = tiers
        self._max_overtakes = max_overtakes
        self._overtakes: dict[RequestId, int] = {}

    def choose(self, *, now: float, may_wait: bool) -> QueueChoice | None:
        """Choose the next request; None when the queue is empty, or all in reach wait for disk or another's blocks."""
        found: list[QueueCandidate] = []
        best = 0
        for request in islice(self._waiting, _REACH):
            if found and request.priority != found[0].request.priority:
                break
            scoring = request.scoring
            match = self._blocks.match(request, max_tokens=None if scoring is None else scoring.num_scored)
            may_reuse = scoring is None or scoring.may_reuse
            if may_reuse and self._must_wait(request, match.num_blocks, now, may_wait=may_wait):
                continue
            found.append(QueueCandidate(request=request, match=match))
            if match.num_blocks > found[best].match.num_blocks:
                best = len(found) - 1
            if len(found) == WINDOW or self._may_not_be_passed(request):
                break
        if not found:
            return None
        return QueueChoice(head=found[0], best=found[best], overtaken=tuple(c.request for c in found[:best]))

    def _must_wait(self, request: Request, num_found_blocks: int, now: float, *, may_wait: bool) -> bool:
        if self._tiers is not None and self._tiers.must_wait(request, num_found_blocks, now):
            return True
        if not may_wait or not self._in_flight.must_wait(request, num_found_blocks):
            return False
        return self._tiers is None or not self._tiers.num_loadable_blocks(request, num_found_blocks)

    def _may_not_be_passed(self, request: Request) -> bool:
        return self._overtakes.get(request.request_id, 0) >= self._max_overtakes

    def record_overtakes(self, choice: QueueChoice) -> None:
        """Count the overtakes of a choice whose best has left the queue."""
        for request in choice.overtaken:
            self._overtakes[request.request_id] = self._overtakes.get(request.request_id, 0) + 1

    def num_overtakes(self, request_id: RequestId) -> int:
        """Number of requests that have overtaken this one thanks to a cached prefix."""
        return self._overtakes.get(request_id, 0)

    def forget(self, request_id: RequestId) -> None:
        """Forget a finished request."""
        self._overtakes.pop(request_id, None)
