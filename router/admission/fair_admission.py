"""Who runs now, who waits and who is turned away: limits, fair shares and predicted waiting times together. Pure.

    enter -> (waits) -> has its turn -> placed -> ended

A request is refused before anything is computed for it when its tenant's limits are reached (429), when the queue is
full (429, the longest line first), or when it is predicted to come too late (503); each refusal says when to come back.
Whoever waits is looked at again and again. Nobody waits while the cluster has room, and nobody for the prefill pool
whose prompt a decode worker would read itself.
"""

from collections.abc import Callable, Sequence

from router.admission.cluster_capacity import ClusterCapacity, Shortage
from router.admission.cost_estimates import TicketIssuer
from router.admission.counts import AdmissionCounts, Rejection
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.queue_limits import select_victims
from router.admission.rate_limits import RateLimiter
from router.admission.turn_rule import CapacityWatch, TurnRule
from router.admission.types import AdmissionEntry, AdmissionPolicy, AdmissionRequest, AdmissionResult, QueuedTotals
from router.admission.wait_forecast import WaitForecast
from router.workers.columns import ClusterView
from tandem.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable


class FairAdmission:
    """The decisions of one router."""

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        places: Callable[[int], int],
        limiter: RateLimiter,
        policy: AdmissionPolicy,
        clock: Callable[[], float],
        num_refused: Callable[[], int] = int,
        is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """`places`, `num_refused`: see `TurnRule`; `is_due`: see `CapacityWatch`."""
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
        self._rule = TurnRule(self._queue, self._watch, places=places, num_refused=num_refused)
        self._forecast = WaitForecast(self._queue, self._rule, policy=policy, clock=clock, num_refused=num_refused)
        self.closed = False
        self.counts = AdmissionCounts()
        self.num_inflight = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_refused(self) -> int:
        """Choices that had their turn and that every decode worker was too full for."""
        return self._num_refused()

    def held(self) -> dict[Shortage, QueuedTotals]:
        """All in line by what they wait for: what they lack themselves, or else what who goes before them lacks."""
        return self._rule.held(self._watch.look())

    def has_idle_room(self) -> bool:
        """Whether nobody waits, and the cluster would take another request at once."""
        return not self.closed and not len(self._queue) and self._watch.look().takes(0)

    def oldest_s(self) -> float:
        """For how long the one has waited that has waited longest."""
        now_s = self._clock()
        return now_s - min((ticket.arrived_s for ticket in self._queue), default=now_s)

    def enter(self, wanted: AdmissionRequest) -> tuple[AdmissionEntry, list[tuple[AdmissionEntry, ServingError]]]:
        """As `enter_call`, for one. Raises Overloaded or Unavailable with the time to come back."""
        entered = self.enter_call([wanted])
        if entered.refusal is not None:
            raise entered.refusal
        return entered.entries[0], entered.evicted

    def enter_call(self, call: Sequence[AdmissionRequest]) -> "AdmissionResult":
        """Count all requests of one client call in, or none: what is refused costs nothing. Each waits unless it has
        its turn at once. Raises Overloaded, Unavailable, or InvalidRequest for more than the tenant may ever have.
        """
        entries = self._admit(call)
        entered = AdmissionResult(entries, [])
        for number, (entry, wanted) in enumerate(zip(entries, call, strict=True)):
            try:
                entered.evicted.extend([] if wanted.promised else self._line_up(entry))
            except ServingError as error:
                self.counts.rejected_with_it(len(call) - 1)
                for former in entries[:number]:
                    self.end(former, taken=False)
                for rest in entries[number:]:
                    self._limiter.cancel(rest.grant)
                return entered._replace(refusal=error)
            finally:
                self._forecast.seen(wanted.tenant, entry.ticket.arrived_s)
            self.num_inflight += 1
            if not entry.waiting:
                self._give_turn(entry)
        return entered

    def pump(self) -> list[AdmissionEntry]:
        """Those whose turn it is now."""
        turns: list[AdmissionEntry] = []
        if not len(self._queue):
            return turns
        self._pass_time()
        while (first := self._queue.first()) is not None:
            room = self._watch.look()
            if (ticket := self._rule.next_turn(first, room)) is None:
                break
            if ticket is first:  # who passes makes no other's turn come sooner
                self._forecast.meter.served(ticket.cost)
            self._queue.remove(ticket)
            entry = self._entries.pop(ticket)
            entry.is_local = room.reads_itself(ticket.num_tokens) is not None
            self._give_turn(entry)
            turns.append(entry)
        return turns

    def hopeless(self) -> list[tuple[AdmissionEntry, ServingError]]:
        """Those in line that cannot be served in time any more; they have ended."""
        if not len(self._queue):
            return []
        self._pass_time()
        room, forecast = self._watch.look(), self._forecast
        # A prediction may be wrong, so those let in are given more time; here is none.
        patience = 1.0 if room.awaited else self._policy.patience
        whole_s = forecast.whole_s(room)
        found = []
        for ticket in list(self._queue):
            if (
                forecast.left_s(ticket, room, patience) <= whole_s
                and (late := forecast.lateness(ticket, room, share=1.0, patience=patience)) is not None
            ):
                entry = self._entries[ticket]
                error = self._refuse(ticket, *late, waited=True)
                self.end(entry)
                found.append((entry, error))
        return found

    def placed(self, entry: AdmissionEntry) -> None:
        """Workers' books have it now."""
        self._watch.placed(entry)

    def generated(self, entry: AdmissionEntry, num_tokens: int) -> None:
        """Tokens came that its client did not have."""
        entry.output_tokens += num_tokens
        self._counters.charge(entry.ticket.tenant, output_tokens=num_tokens)

    def adopted(self, entry: AdmissionEntry) -> None:
        """A worker still had what it goes on with: its prompt was not computed again."""
        self._counters.charge(entry.ticket.tenant, input_tokens=-entry.ticket.work_tokens)
        entry.ticket.num_tokens, entry.ticket.work_tokens = 0, 0.0

    def cached(self, entry: AdmissionEntry, num_tokens: int) -> None:
        """A choice has ended, whose prompt had so many tokens cached."""
        entry.cached_tokens = max(entry.cached_tokens or 0, num_tokens)

    def end(self, entry: AdmissionEntry, *, taken: bool = True) -> None:
        """It is over, however; `taken`: a worker took it, or may have, else it costs nothing. No-op the second time."""
        if entry.ended:
            return
        entry.ended = True
        self._forecast.seen(entry.ticket.tenant, self._clock())
        self.num_inflight -= 1
        self.placed(entry)
        ticket = entry.ticket
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
        """Seconds until a request that came now would have its first token."""
        ticket, room = self._tickets.make(wanted), self._watch.look()
        return self._forecast.wait_s(ticket, room) + room.compute_s(ticket.work_tokens)

    def _admit(self, call: Sequence[AdmissionRequest]) -> list[AdmissionEntry]:
        tenant, promised = call[0].tenant, all(wanted.promised for wanted in call)
        if self.closed and not promised:
            self.counts.rejected(Rejection.DRAINING, tenant, len(call))
            raise Unavailable("the router is draining", retry_after_s=1.0)
        tickets = [self._tickets.make(wanted) for wanted in call]
        try:
            estimates = [ticket.num_tokens + ticket.output_tokens for ticket in tickets]
            leaving = sum(wanted.leaving for wanted in call)
            grants = self._limiter.admit_call(tenant, estimates, promised=promised, leaving=leaving)
        except Overloaded as error:
            self.counts.rejected(Rejection(error.param), tenant, len(call))
            raise
        return [AdmissionEntry(ticket=ticket, grant=grant) for ticket, grant in zip(tickets, grants, strict=True)]

    def _line_up(self, entry: AdmissionEntry) -> list[tuple[AdmissionEntry, ServingError]]:
        """Make it wait, unless it need not. Raises what `enter` raises."""
        ticket, room, forecast = entry.ticket, self._watch.look(), self._forecast
        # Who fits no pool would wait in vain, and whoever is behind it as well.
        too_large = not room.ever_holds(ticket.num_tokens)
        at_once = too_large or (self._rule.lack(ticket, room) is None and self._rule.passes(ticket, room))
        if at_once and not len(self._queue):
            rate = forecast.rate(room)
            spare = rate * forecast.meter.since(ticket.arrived_s)
            self._counters.unclaimed(ticket.tenant, spare, credit=self._policy.credit_s * rate)
        self._pass_time()
        late = forecast.lateness(ticket, room, share=1.0 if at_once else self._policy.entry_share)
        if late is not None and not too_large:
            raise self._refuse(ticket, *late)
        if at_once:
            if ticket.tenant not in (waiting := self._queue.tenants):
                self._counters.activate(ticket.tenant, waiting, credit=forecast.credit(ticket, room))
            entry.is_local = room.reads_itself(ticket.num_tokens) is not None
            return []
        evicted = self._make_place(ticket, room)
        self._queue.push(ticket, credit=forecast.credit(ticket, room))
        self._entries[ticket] = entry
        entry.waiting = True
        return evicted

    def _make_place(self, ticket: Ticket, room: ClusterCapacity) -> list[tuple[AdmissionEntry, ServingError]]:
        """End those that must give way to it. Raises Overloaded before anybody has ended if that would not suffice."""
        if (leaving := select_victims(ticket, self._queue, self._counters, self._policy)) is None:
            raise self._turned_away(ticket, room)
        return [self._evict(victim, room) for victim in leaving]

    def _evict(self, victim: Ticket, room: ClusterCapacity) -> tuple[AdmissionEntry, ServingError]:
        entry = self._entries[victim]
        self.end(entry)
        return entry, self._turned_away(victim, room)

    def _turned_away(self, ticket: Ticket, room: ClusterCapacity) -> Overloaded:
        wait_s = ticket.cost / self._forecast.rate(room)
        self.counts.rejected(Rejection.QUEUE_FULL, ticket.tenant)
        retry_s = self._forecast.retry_after_s(ticket, wait_s, room)
        return Overloaded(f"{len(self._queue)} requests wait", retry_after_s=retry_s)

    def _refuse(self, ticket: Ticket, why: Rejection, over_s: float, *, waited: bool = False) -> ServingError:
        self.counts.rejected(Rejection.HOPELESS if waited else why, ticket.tenant)
        if why is Rejection.DEADLINE and ticket.deadline_s is not None and ticket.deadline_s <= self._clock():
            return DeadlineExceeded("the request's time ran out before its turn came")
        retry_s = self._forecast.retry_after_s(ticket, over_s, room := self._watch.look())
        why_late = "no decode worker takes requests" if room.awaited else "the cluster is overloaded"
        bound = "its deadline" if why is Rejection.DEADLINE else f"{self._policy.max_queue_s:g} s"
        return Unavailable(f"{why_late}: the wait would be longer than {bound}", retry_after_s=retry_s)

    def _pass_time(self) -> None:
        # How fast the queue drains is not learned while there is nobody to drain it.
        self._forecast.meter.passed(self._clock(), busy=len(self._queue) > 0 and not self._watch.awaited)

    def _give_turn(self, entry: AdmissionEntry) -> None:
        entry.waiting, entry.had_turn = False, True
        self._watch.began(entry)
        self._counters.served(entry.ticket.tenant, input_tokens=entry.ticket.work_tokens)
        self.counts.waited(self._clock() - entry.ticket.arrived_s)
