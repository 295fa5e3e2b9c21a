"""Which requests may run now: what each lacks, and which may overtake the first in the queue. Pure."""

import math
from collections.abc import Callable

from msgspec.structs import replace

from router.admission.cluster_capacity import CapacityPolicy, ClusterCapacity, InTransit, Shortage, measure_capacity
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.types import AdmissionEntry, QueuedTotals, RefusedMemory
from router.workers.columns import ClusterView

_NOTHING_IN_TRANSIT = InTransit()
_NONE_REFUSED = RefusedMemory(least_tokens=math.inf, total_tokens=0.0)


class CapacityWatch:
    """Measures the room for requests beside those that had their turn and are not placed yet."""

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        policy: CapacityPolicy,
        clock: Callable[[], float],
        is_due: Callable[[], bool],
    ) -> None:
        """`is_due`: whether a decode worker is expected; called while none accepts requests."""
        self._view = view
        self._policy = policy
        self._clock = clock
        self._is_due = is_due
        self.in_transit: set[AdmissionEntry] = set()
        """Requests that had their turn and are not placed yet."""
        self.awaited = False
        """Whether, at the last measurement, no worker served and one was expected to."""

    def measure(self) -> ClusterCapacity:
        """Measure the cluster's capacity at this moment."""
        transit = self._transit() if self.in_transit else _NOTHING_IN_TRANSIT
        room = measure_capacity(self._view(), self._policy, transit, self._clock())
        self.awaited = not room.usable and self._is_due()
        return replace(room, awaited=True) if self.awaited else room

    def _transit(self) -> InTransit:
        work_tokens = local_tokens = 0.0
        for entry in self.in_transit:
            if entry.is_local:
                local_tokens += entry.ticket.work_tokens
            else:
                work_tokens += entry.ticket.work_tokens
        return InTransit(num_requests=len(self.in_transit), work_tokens=work_tokens, local_tokens=local_tokens)


class TurnRule:
    """Decides which requests may run, given what the cluster has room for."""

    def __init__(
        self,
        queue: FairQueue,
        watch: CapacityWatch,
        *,
        places: Callable[[int], int],
        num_refused: Callable[[], int],
        refused: Callable[[], RefusedMemory],
    ) -> None:
        """`places`: how many further requests of a priority may run, whatever the workers report. `num_refused`:
        choices that had their turn and that every decode worker was too full for; they go first. `refused`: what these
        wait for; called while there are some.
        """
        self._queue = queue
        self._watch = watch
        self._places = places
        self._num_refused = num_refused
        self._refused = refused
        self._overtakers: dict[AdmissionEntry, None] = {}
        """Requests in flight that overtook another: those of them that hold memory which it waits for."""
        self._last_shortage = Shortage.ROUTER
        """The shortage of the request that last had to wait."""

    def shortage(self, ticket: Ticket, room: ClusterCapacity) -> Shortage | None:
        """Return why it cannot run now; None: it can, or never will."""
        shortage = room.shortage(ticket.num_tokens)
        if self._num_refused() and not self._fits_beside_refused(ticket.num_tokens, room):
            shortage = Shortage.DECODE if shortage is None else shortage.and_decode()
        elif shortage is None and self._places(ticket.priority) <= len(self._watch.in_transit):
            shortage = Shortage.ROUTER
        # Waiting makes no room for a prompt that no pool holds.
        return shortage if shortage is None or room.can_ever_hold(ticket.num_tokens) else None

    def next_turn(self, first: Ticket, room: ClusterCapacity) -> Ticket | None:
        """Return the request that runs next: the first in line, or one that may overtake it; None: all wait."""
        if (shortage := self.shortage(first, room)) is None:
            return first
        self._last_shortage = shortage
        ticket = self._queue.first_within(self._max_overtaking_tokens(first, room))
        # A background request may lack a place that the first one has.
        return None if ticket is None or self._lacks_place(ticket) else ticket

    def may_overtake(self, ticket: Ticket, room: ClusterCapacity) -> bool:
        """Whether it may run at once, ahead of the queue: no waiting request could run before it."""
        if (first := self._queue.first()) is None:
            return True
        most = self._max_overtaking_tokens(first, room)
        return ticket.num_tokens <= most and self._queue.first_within(most) is None

    def can_be_overtaken(self, first: Ticket, room: ClusterCapacity) -> bool:
        """Whether the first in line waits for the prefill pool alone, with a slot left for it if another overtakes."""
        return (
            self.shortage(first, room) is Shortage.PREFILL
            and self._places(first.priority) > len(self._watch.in_transit) + 1
        )

    def on_turn(self, entry: AdmissionEntry, overtaken: Ticket | None) -> None:
        """Record that a request has its turn; `overtaken`: the first in line, if that is another one."""
        if overtaken is not None:
            overtaken.is_overtaken = True
        if overtaken is not None or self._num_refused():
            self._overtakers[entry] = None
        elif entry.ticket.is_overtaken:
            # They have let it pass; who is next may be overtaken as often.
            self._overtakers.clear()

    def on_end(self, entry: AdmissionEntry) -> None:
        """Record that a request that had its turn has ended."""
        self._overtakers.pop(entry, None)

    def held(self, room: ClusterCapacity) -> dict[Shortage, QueuedTotals]:
        """Sum the queue by what requests wait for: what they lack themselves, or what the request ahead of them
        lacks."""
        held = {shortage: QueuedTotals() for shortage in Shortage}
        if (first := self._queue.first()) is not None:
            ahead = self.shortage(first, room) or self._last_shortage
            for ticket in self._queue:
                sums = held[self.shortage(ticket, room) or ahead]
                sums.num_requests += 1
                sums.num_tokens += ticket.num_tokens
        return held

    def _max_overtaking_tokens(self, first: Ticket, room: ClusterCapacity) -> float:
        """Return the longest prompt that need not wait behind the first in line; below 0: none.

        While the first one waits for prefill, a decode worker may compute another at once, and leaves what else the
        first one needs. While it waits for memory, those that overtake it may have as much of a pool as holds it
        besides: so it has its turn when what ran before it has ended, however many pass.
        """
        if self.can_be_overtaken(first, room):
            return room.max_overtaking_tokens(first.num_tokens)
        refused = self._refused() if self._num_refused() else _NONE_REFUSED
        lacks_memory = first.num_tokens >= min(room.free_tokens, refused.least_tokens)
        if not lacks_memory or self._places(first.priority) <= len(self._watch.in_transit) + 1:
            return -1.0
        beside = room.pool_tokens - refused.total_tokens - first.num_tokens - self._num_overtaking_tokens() - 1
        return min(room.max_fitting_tokens(), refused.least_tokens - 1, beside)

    def _fits_beside_refused(self, num_tokens: int, room: ClusterCapacity) -> bool:
        """Whether refused choices have no better claim to the memory: it needs less than the smallest of them, and the
        largest pool would hold it, all of them, and what overtook them."""
        refused = self._refused()
        most = room.pool_tokens - refused.total_tokens
        return num_tokens < min(refused.least_tokens, most) and num_tokens < most - self._num_overtaking_tokens()

    def _num_overtaking_tokens(self) -> float:
        """Tokens in flight, with those expected, of requests that overtook others."""
        return sum(
            entry.ticket.num_tokens + max(entry.ticket.output_tokens, entry.output_tokens) for entry in self._overtakers
        )

    def _lacks_place(self, ticket: Ticket) -> bool:
        return self._places(ticket.priority) <= len(self._watch.in_transit)
