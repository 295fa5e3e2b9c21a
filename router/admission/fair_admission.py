"""Admission of one router: which requests run now, which wait, and which are refused. Pure.

    enter -> (waits) -> has its turn -> placed -> ended

A request is refused before anything is computed for it when its tenant's limits are reached
(`router.admission.rate_limits`, 429), when the queue is full (`router.admission.queue_limits`, 429, the longest line
first), or when it is predicted to come too late (503); each refusal says when to retry. Waiting requests are
reconsidered whenever something changes. No request waits while the cluster has room, but for what is left to one that
waits for more memory (`router.admission.turn_rule`), and none waits for the prefill pool if a decode worker would
compute its prompt itself.
"""

import math
from collections.abc import Callable, Collection, Sequence

from router.admission.cluster_capacity import ClusterCapacity, Shortage
from router.admission.cost_estimates import TicketIssuer
from router.admission.counts import AdmissionCounts, Rejection
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.queue_limits import InflightLimit, QueueLimits
from router.admission.rate_limits import RateLimiter
from router.admission.turn_rule import CapacityWatch, TurnRule
from router.admission.types import (
    AdmissionEntry,
    AdmissionPolicy,
    AdmissionRequest,
    AdmissionResult,
    QueuedTotals,
    RefusedMemory,
)
from router.admission.wait_forecast import WaitForecast
from router.workers.columns import ClusterView
from tandem.errors import Overloaded, ServingError

_ALL_MEMORY = RefusedMemory(least_tokens=0.0, total_tokens=math.inf)
"""Nothing overtakes refused choices of which it is unknown what they need."""


class FairAdmission:
    """Decides for every request of one router. `router.dispatch.admission_queue` carries it out."""

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        num_running: Callable[[], int],
        limiter: RateLimiter,
        policy: AdmissionPolicy,
        clock: Callable[[], float],
        num_refused: Callable[[], int] = int,
        refused: Callable[[], RefusedMemory] = lambda: _ALL_MEMORY,
        is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """`num_running`: requests that dispatch has; `num_refused`, `refused`: see `TurnRule`; `is_due`: see
        `CapacityWatch`."""
        self._num_refused = num_refused
        self._limiter = limiter
        self._policy = policy
        self._clock = clock
        self._counters = VirtualCounters(
            weight_of=limiter.weight, input_weight=policy.input_weight, output_weight=policy.output_weight
        )
        self._queue = FairQueue(self._counters)
        self._entries: dict[Ticket, AdmissionEntry] = {}
        self._tickets = TicketIssuer(self._counters, limiter, clock)
        self._watch = CapacityWatch(view=view, policy=policy.room, clock=clock, is_due=is_due)
        places = InflightLimit(policy, num_running)
        self._rule = TurnRule(
            self._queue, self._watch, places=places.num_free, num_refused=num_refused, refused=refused
        )
        self._forecast = WaitForecast(self._queue, self._rule, policy=policy, clock=clock, num_refused=num_refused)
        self.counts = AdmissionCounts()
        self._limits = QueueLimits(
            self._queue, self._counters, self._forecast, policy=policy, counts=self.counts, clock=clock
        )
        self.closed = False
        """No new request is admitted."""
        self.ended = False
        """No continued stream is admitted either."""
        self.num_inflight = 0

    @property
    def num_waiting(self) -> int:
        return self._queue.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_refused(self) -> int:
        """Choices that had their turn and that every decode worker was too full for."""
        return self._num_refused()

    def held(self) -> dict[Shortage, QueuedTotals]:
        """Sum the queue by what requests wait for: what they lack themselves, or what the request ahead of them
        lacks."""
        return self._rule.held(self._watch.measure())

    def has_idle_room(self) -> bool:
        """Whether no request waits and the cluster would run another one at once."""
        return not self.closed and not self._queue.num_requests and self._watch.measure().takes(0)

    def oldest_s(self) -> float:
        """Seconds that the longest-waiting request has waited."""
        now_s = self._clock()
        return now_s - min((ticket.arrived_s for ticket in self._queue), default=now_s)

    def enter(self, wanted: AdmissionRequest) -> tuple[AdmissionEntry, list[tuple[AdmissionEntry, ServingError]]]:
        """Admit one request, like `enter_call`. Raises Overloaded or Unavailable with a Retry-After."""
        entered = self.enter_call([wanted])
        if entered.refusal is not None:
            raise entered.refusal
        return entered.entries[0], entered.evicted

    def enter_call(self, call: Sequence[AdmissionRequest]) -> "AdmissionResult":
        """Count all requests of one client call in, or none: a refused call costs nothing. Each request waits unless it
        has its turn at once. Raises Overloaded, Unavailable, or InvalidRequest for more than the tenant may ever have.
        """
        entries = self._admit(call)
        evicted: list[tuple[AdmissionEntry, ServingError]] = []
        for number, (entry, wanted) in enumerate(zip(entries, call, strict=True)):
            try:
                if not wanted.promised:
                    evicted += self._line_up(entry)
            except ServingError as error:
                self.counts.rejected_with_it(len(call) - 1)
                for former in entries[:number]:
                    self.end(former, taken=False)
                for rest in entries[number:]:
                    self._limiter.cancel(rest.grant)
                return AdmissionResult(entries, evicted, error)
            finally:
                self._forecast.last_seen_s[wanted.tenant] = entry.ticket.arrived_s
            self.num_inflight += 1
            if not entry.waiting:
                first = self._queue.first()
                if first is not None and not (entry.is_local or wanted.promised):
                    self._forecast.meter.served(entry.ticket.cost)
                self._give_turn(entry, overtaken=first)
        return AdmissionResult(entries, evicted)

    def pump(self) -> list[AdmissionEntry]:
        """Give turns to the requests that may run now, and return them."""
        turns: list[AdmissionEntry] = []
        if not self._queue.num_requests:
            return turns
        self._pass_time()
        while (first := self._queue.first()) is not None:
            room = self._watch.measure()
            if (ticket := self._rule.next_turn(first, room)) is None:
                break
            self._queue.remove(ticket)
            entry = self._entries.pop(ticket)
            entry.is_local = room.local_prefill(ticket.num_tokens) is not None
            if ticket is first or not entry.is_local:  # else it brings no other request's turn closer
                self._forecast.meter.served(ticket.cost)
            self._give_turn(entry, overtaken=None if ticket is first else first)
            turns.append(entry)
        return turns

    def end_hopeless(self) -> list[tuple[AdmissionEntry, ServingError]]:
        """End waiting requests that can no longer be served in time; return each with its refusal."""
        if not self._queue.num_requests:
            return []
        self._pass_time()
        room, forecast = self._watch.measure(), self._forecast
        # A prediction may be wrong, so admitted requests get more time than this; these have none left.
        patience = 1.0 if room.awaited else self._policy.patience
        whole_s = forecast.whole_s(room)
        found = []
        for ticket in list(self._queue):
            if forecast.left_s(ticket, room, patience) > whole_s:
                continue
            wait_s = forecast.wait_s(ticket, room)
            if (late := forecast.lateness(ticket, room, wait_s, share=1.0, patience=patience)) is not None:
                entry = self._entries[ticket]
                error = self._limits.too_late_error(ticket, *late, room, waited=True)
                self.end(entry)
                found.append((entry, error))
        return found

    def placed(self, entry: AdmissionEntry) -> None:
        """Count a request as its workers' from now on."""
        self._watch.in_transit.discard(entry)

    def generated(self, entry: AdmissionEntry, num_tokens: int) -> None:
        """Charge tokens that the client did not have yet."""
        entry.output_tokens += num_tokens
        self._counters.charge(entry.ticket.tenant, output_tokens=num_tokens)

    def adopted(self, entry: AdmissionEntry) -> None:
        """Refund the charge for the prompt of a stream that a worker still had."""
        self._counters.charge(entry.ticket.tenant, input_tokens=-entry.ticket.work_tokens)
        entry.ticket.num_tokens, entry.ticket.work_tokens = 0, 0.0

    def cached(self, entry: AdmissionEntry, num_tokens: int) -> None:
        """Record how many prompt tokens of an ended choice were cached."""
        entry.cached_tokens = max(entry.cached_tokens or 0, num_tokens)

    def end(self, entry: AdmissionEntry, *, taken: bool = True) -> None:
        """End a request. `taken`: a worker accepted it, or may have; otherwise it costs nothing. Calling it twice is
        harmless."""
        if entry.ended:
            return
        entry.ended = True
        ticket = entry.ticket
        self._forecast.last_seen_s[ticket.tenant] = self._clock()
        self.num_inflight -= 1
        self._watch.in_transit.discard(entry)
        self._rule.on_end(entry)
        if entry.waiting:
            self._pass_time()
            self._queue.remove(ticket)
            del self._entries[ticket]
            self._limiter.cancel(entry.grant)
            return
        if not taken:
            self._counters.charge(ticket.tenant, input_tokens=-ticket.work_tokens)
            self._limiter.cancel(entry.grant)
            return
        if entry.cached_tokens is not None:
            self._tickets.learn(entry, entry.cached_tokens)
        self.counts.served(ticket.tenant, ticket.num_tokens, entry.output_tokens)
        self._limiter.settle(entry.grant, ticket.num_tokens + entry.output_tokens)

    def predicted_first_token_s(self, wanted: AdmissionRequest) -> float:
        """Predict the seconds until a request arriving now would have its first token."""
        ticket, room = self._tickets.make(wanted), self._watch.measure()
        return self._forecast.wait_s(ticket, room) + room.compute_s(ticket.work_tokens)

    def _admit(self, call: Sequence[AdmissionRequest]) -> list[AdmissionEntry]:
        tenant, promised, leaving = call[0].tenant, True, 0
        tickets: list[Ticket] = []
        estimates: list[float] = []
        for wanted in call:
            ticket = self._tickets.make(wanted)
            tickets.append(ticket)
            estimates.append(ticket.num_tokens + ticket.output_tokens)
            promised = promised and wanted.promised
            leaving += wanted.leaving
        if self.ended or (self.closed and not promised):
            raise self._limits.draining_error(tenant, len(call))
        try:
            grants = self._limiter.admit_call(tenant, estimates, promised=promised, leaving=leaving)
        except Overloaded as error:
            self.counts.rejected(Rejection(error.param), tenant, len(call))
            raise
        entries = []
        for ticket, grant in zip(tickets, grants, strict=True):
            entries.append(AdmissionEntry(ticket=ticket, grant=grant))
        return entries

    def _line_up(self, entry: AdmissionEntry) -> list[tuple[AdmissionEntry, ServingError]]:
        """Queue the request, unless it may run at once. Raises what `enter` raises."""
        ticket, room, forecast = entry.ticket, self._watch.measure(), self._forecast
        num_tokens, nobody_waits = ticket.num_tokens, not self._queue.num_requests
        # A request that fits no pool, which lacks nothing, would wait in vain, and so would every request behind it.
        at_once = self._rule.shortage(ticket, room) is None and (
            nobody_waits or self._rule.may_overtake(ticket, room) or not room.can_ever_hold(num_tokens)
        )
        # What could have been done in the time that passes now goes by the rate before it.
        rate = forecast.meter.rate(room.prefill_tokens_per_s)
        passed_s = self._pass_time()
        if at_once:
            if nobody_waits:
                self._counters.unclaimed(ticket.tenant, rate * passed_s, credit=self._policy.credit_s * rate)
            # As `wait_s` says, which would ask all this again.
            wait_s, share = room.least_wait_of(num_tokens), 1.0
        else:
            wait_s, share = forecast.wait_s(ticket, room), self._policy.entry_share
        late = forecast.lateness(ticket, room, wait_s, share=share)
        if late is not None and room.can_ever_hold(num_tokens):
            raise self._limits.too_late_error(ticket, *late, room)
        if at_once:
            waiting: Collection[str] = () if nobody_waits else self._queue.tenants
            if ticket.tenant not in waiting:
                self._counters.activate(ticket.tenant, waiting, credit=forecast.credit(ticket, room))
            entry.is_local = room.local is not None and room.local.reads(num_tokens)
            return []
        evicted = [self._displace(victim, room) for victim in self._limits.evict_for(ticket, room)]
        self._queue.push(ticket, credit=forecast.credit(ticket, room))
        self._entries[ticket] = entry
        entry.waiting = True
        return evicted

    def _displace(self, victim: Ticket, room: ClusterCapacity) -> tuple[AdmissionEntry, ServingError]:
        entry = self._entries[victim]
        self.end(entry)
        return entry, self._limits.queue_full_error(victim, room)

    def _pass_time(self) -> float:
        """Let the meter's time pass, and return the seconds."""
        # The drain rate is not learned while no worker drains the queue.
        busy = self._queue.num_requests > 0 and not self._watch.awaited
        return self._forecast.meter.passed(self._clock(), busy=busy)

    def _give_turn(self, entry: AdmissionEntry, *, overtaken: Ticket | None) -> None:
        """`overtaken`: the first in line, if that is another one."""
        entry.waiting = False
        self._rule.on_turn(entry, overtaken)
        self._watch.in_transit.add(entry)
        self._counters.served(entry.ticket.tenant, input_tokens=entry.ticket.work_tokens)
        self.counts.num_turns += 1
        self.counts.waited_s += self._clock() - entry.ticket.arrived_s
