"""Who runs now, who waits and who is turned away: limits, fair shares and predicted waiting times together. Pure.

    enter -> (waits) -> has its turn -> placed -> ended

A request is refused before anything is computed for it when its tenant's limits are reached (429), when the queue is
full (429, the longest line first), or when it is predicted to come too late (503); each refusal says when to come back.
The prediction is the wait in line, by what is served before it in fair order at the rate at which the queue drains,
then the backlog of the worker that is done first, then its own prompt. Whoever waits is looked at again and again.
Nobody waits while the cluster has room, and nobody for the prefill pool whose prompt a decode worker would read itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from router.admission_counts import AdmissionCounts, Rejection
from router.admission_values import AdmissionPolicy, Entered, Entry, Held, Wanted
from router.cluster_room import ClusterRoom, DrainMeter, InTransit, Lack, look
from router.fair_queue import FairQueue, Ticket
from router.fair_share import VirtualCounters
from router.pools import ClusterView
from router.retry_times import RetryTimes
from router.tenant_limits import Limiter
from router.tickets import Tickets
from tandem.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable


class FairAdmission:
    """The decisions of one router."""

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        places: Callable[[int], int],
        limiter: Limiter,
        policy: AdmissionPolicy,
        clock: Callable[[], float],
        num_refused: Callable[[], int] = int,
        is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """`places`: how many requests of a priority may run besides, whatever the workers say. `num_refused`: those
        that had their turn and that every decode worker was too full for; they go first. `is_due`: whether a decode
        worker is expected, asked while none takes requests.
        """
        self._view = view
        self._is_due = is_due
        self._awaited = False
        """At the last look: nobody serves, and somebody is expected to."""
        self._places = places
        self._num_refused = num_refused
        self._limiter = limiter
        self._policy = policy
        self._clock = clock
        self._counters = VirtualCounters(
            weight_of=limiter.weight, input_weight=policy.input_weight, output_weight=policy.output_weight
        )
        self._queue = FairQueue(self._counters)
        self._entries: dict[Ticket, Entry] = {}
        self._tickets = Tickets(self._counters, limiter, clock)
        self._meter = DrainMeter(now_s=clock())
        self._lacked = Lack.ROUTER
        """By whoever had to wait last."""
        self._transit: set[Entry] = set()
        self._retry = RetryTimes(now_s=clock())
        self._seen_s: dict[str, float] = {}
        """When each tenant last had a request here."""
        self.closed = False
        self.counts = AdmissionCounts()
        self.num_inflight = 0

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Of their prompts."""
        return self._queue.num_tokens

    @property
    def num_refused(self) -> int:
        """Choices that had their turn and that every decode worker was too full for."""
        return self._num_refused()

    def held(self) -> dict[Lack, Held]:
        """All in line by what they wait for: what they lack themselves, or else what who goes before them lacks."""
        held = {lack: Held() for lack in Lack}
        if (first := self._queue.first()) is not None:
            room = self._room()
            ahead = self._lack(room, first) or self._lacked
            for ticket in self._queue:
                sums = held[self._lack(room, ticket) or ahead]
                sums.num_requests += 1
                sums.num_tokens += ticket.num_tokens
        return held

    def has_idle_room(self) -> bool:
        """Whether nobody waits, and the cluster would take another request at once."""
        return not self.closed and not len(self._queue) and self._room().takes(0)

    def oldest_s(self) -> float:
        """For how long the one has waited that has waited longest."""
        now_s = self._clock()
        return now_s - min((ticket.arrived_s for ticket in self._queue), default=now_s)

    def enter(self, wanted: Wanted) -> tuple[Entry, list[tuple[Entry, ServingError]]]:
        """As `enter_call`, for one. Raises Overloaded or Unavailable with the time to come back."""
        entered = self.enter_call([wanted])
        if entered.refusal is not None:
            raise entered.refusal
        return entered.entries[0], entered.evicted

    def enter_call(self, call: Sequence[Wanted]) -> "Entered":
        """Count all requests of one client call in, or none: what is refused costs nothing. Each waits unless it has
        its turn at once. Raises Overloaded, Unavailable, or InvalidRequest for more than the tenant may ever have.
        """
        entries = self._admit(call)
        entered = Entered(entries, [])
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
                self._seen_s[wanted.tenant] = entry.ticket.arrived_s
            self.num_inflight += 1
            if not entry.waiting:
                self._give_turn(entry)
        return entered

    def pump(self) -> list[Entry]:
        """Those whose turn it is now."""
        turns: list[Entry] = []
        if not len(self._queue):
            return turns
        self._pass_time()
        while (first := self._queue.first()) is not None:
            room = self._room()
            if (lack := self._lack(room, first)) is None:
                ticket = first
                # Who passes makes no other's turn come sooner.
                self._meter.served(ticket.cost)
            else:
                self._lacked = lack
                if (passing := self._queue.first_within(self._most_passing(room))) is None:
                    break
                ticket = passing
            self._queue.remove(ticket)
            entry = self._entries.pop(ticket)
            entry.is_local = room.reads_itself(ticket.num_tokens) is not None
            self._give_turn(entry)
            turns.append(entry)
        return turns

    def _most_passing(self, room: ClusterRoom) -> float:
        """The longest prompt that need not wait for whoever is first, who waits for the prefill pool; below 0: none.

        A decode worker reads it at once, and what else the first one needs is left to it.
        """
        first = self._queue.first()
        return -1.0 if first is None or not self._may_be_passed(first, room) else room.most_passing(first.num_tokens)

    def _may_be_passed(self, first: Ticket, room: ClusterRoom) -> bool:
        return self._lack(room, first) is Lack.PREFILL and self._places(first.priority) > len(self._transit) + 1

    def hopeless(self) -> list[tuple[Entry, ServingError]]:
        """Those in line that cannot be served in time any more; they have ended."""
        if not len(self._queue):
            return []
        self._pass_time()
        room, now_s = self._room(), self._clock()
        # A prediction may be wrong, so those let in are given more time; here is none.
        patience = 1.0 if room.awaited else self._policy.patience
        # Nobody waits longer than it takes to serve everybody.
        whole_s = sum(t.cost for t in self._queue) / self._rate(room) + room.least_wait_s
        found = []
        for ticket in list(self._queue):
            if (
                self._left_s(ticket, room, now_s, patience) <= whole_s
                and (late := self._lateness(ticket, room, share=1.0, patience=patience)) is not None
            ):
                entry = self._entries[ticket]
                error = self._refuse(ticket, *late, waited=True)
                self.end(entry)
                found.append((entry, error))
        return found

    def placed(self, entry: Entry) -> None:
        """Workers' books have it now."""
        entry.in_transit = False
        self._transit.discard(entry)

    def generated(self, entry: Entry, num_tokens: int) -> None:
        """Tokens came that its client did not have."""
        entry.output_tokens += num_tokens
        self._counters.charge(entry.ticket.tenant, output_tokens=num_tokens)

    def adopted(self, entry: Entry) -> None:
        """A worker still had what it goes on with: its prompt was not computed again."""
        self._counters.charge(entry.ticket.tenant, input_tokens=-entry.ticket.work_tokens)
        entry.ticket.num_tokens, entry.ticket.work_tokens = 0, 0.0

    def cached(self, entry: Entry, num_tokens: int) -> None:
        """A choice has ended, whose prompt had so many tokens cached."""
        entry.cached_tokens = max(entry.cached_tokens or 0, num_tokens)

    def end(self, entry: Entry, *, taken: bool = True) -> None:
        """It is over, however; `taken`: a worker took it, or may have, else it costs nothing. No-op the second time."""
        if entry.ended:
            return
        entry.ended = True
        self._seen_s[entry.ticket.tenant] = self._clock()
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

    def predicted_first_token_s(self, wanted: Wanted) -> float:
        """Seconds until a request that came now would have its first token."""
        ticket, room = self._tickets.make(wanted), self._room()
        return self._wait_s(ticket, room) + room.compute_s(ticket.work_tokens)

    def _admit(self, call: Sequence[Wanted]) -> list[Entry]:
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
        return [Entry(ticket=ticket, grant=grant) for ticket, grant in zip(tickets, grants, strict=True)]

    def _line_up(self, entry: Entry) -> list[tuple[Entry, ServingError]]:
        """Make it wait, unless it need not. Raises what `enter` raises."""
        ticket, room = entry.ticket, self._room()
        # Who fits no pool would wait in vain, and whoever is behind it as well.
        too_large = not room.ever_holds(ticket.num_tokens)
        at_once = too_large or (self._has_room(room, ticket) and (not len(self._queue) or self._passes(ticket, room)))
        if at_once and not len(self._queue):
            spare = self._rate(room) * self._meter.since(ticket.arrived_s)
            self._counters.unclaimed(ticket.tenant, spare, credit=self._policy.credit_s * self._rate(room))
        self._pass_time()
        late = self._lateness(ticket, room, share=1.0 if at_once else self._policy.entry_share)
        if late is not None and not too_large:
            raise self._refuse(ticket, *late)
        if at_once:
            if ticket.tenant not in (waiting := self._queue.tenants):
                self._counters.activate(ticket.tenant, waiting, credit=self._credit(ticket, room))
            entry.is_local = room.reads_itself(ticket.num_tokens) is not None
            return []
        evicted = self._make_place(ticket, room)
        self._queue.push(ticket, credit=self._credit(ticket, room))
        self._entries[ticket] = entry
        entry.waiting = True
        return evicted

    def _passes(self, ticket: Ticket, room: ClusterRoom) -> bool:
        """Whether it need not line up behind those that wait; nobody who waits could pass before it."""
        most = self._most_passing(room)
        return ticket.num_tokens <= most and self._queue.first_within(most) is None

    def _make_place(self, ticket: Ticket, room: ClusterRoom) -> list[tuple[Entry, ServingError]]:
        """End those that must give way to it. Raises Overloaded before anybody has ended if that would not suffice."""
        policy, queue = self._policy, self._queue
        num_waiting, num_tokens = len(queue), queue.num_tokens + ticket.num_tokens
        victims: list[Ticket] = []
        for victim, line_cost in queue.given_up():
            if num_waiting < policy.max_requests and num_tokens <= policy.max_tokens:
                break
            if not self._displaces(ticket, victim, line_cost):
                raise self._turned_away(ticket, room)
            victims.append(victim)
            num_waiting, num_tokens = num_waiting - 1, num_tokens - victim.num_tokens
        return [self._evict(victim, room) for victim in victims]

    def _evict(self, victim: Ticket, room: ClusterRoom) -> tuple[Entry, ServingError]:
        entry = self._entries[victim]
        self.end(entry)
        return entry, self._turned_away(victim, room)

    def _displaces(self, ticket: Ticket, victim: Ticket, line_cost: float) -> bool:
        if victim.priority != ticket.priority:
            return victim.priority > ticket.priority
        own = self._queue.line_cost(ticket.tenant, ticket.priority)
        own += ticket.cost / self._counters.weight(ticket.tenant)
        return ticket.tenant != victim.tenant and own < line_cost

    def _turned_away(self, ticket: Ticket, room: ClusterRoom) -> Overloaded:
        wait_s = ticket.cost / self._rate(room)
        self.counts.rejected(Rejection.QUEUE_FULL, ticket.tenant)
        return Overloaded(f"{len(self._queue)} requests wait", retry_after_s=self._retry_after_s(ticket, wait_s, room))

    def _lateness(
        self, ticket: Ticket, room: ClusterRoom, *, share: float, patience: float = 1.0
    ) -> tuple[Rejection, float] | None:
        """Why it would come too late with that share of the time to its deadline, and by how much in seconds."""
        now_s, wait_s = self._clock(), self._wait_s(ticket, room)
        if ticket.deadline_s is not None:
            over_s = wait_s + room.compute_s(ticket.work_tokens) - share * (ticket.deadline_s - now_s)
            if over_s > 0.0:
                return Rejection.DEADLINE, over_s
        over_s = now_s - ticket.arrived_s + wait_s - patience * self._policy.max_queue_s
        return (Rejection.QUEUE_TIME, over_s) if over_s > 0.0 else None

    def _refuse(self, ticket: Ticket, why: Rejection, over_s: float, *, waited: bool = False) -> ServingError:
        self.counts.rejected(Rejection.HOPELESS if waited else why, ticket.tenant)
        if why is Rejection.DEADLINE and ticket.deadline_s is not None and ticket.deadline_s <= self._clock():
            return DeadlineExceeded("the request's time ran out before its turn came")
        retry_s = self._retry_after_s(ticket, over_s, room := self._room())
        why_late = "no decode worker takes requests" if room.awaited else "the cluster is overloaded"
        bound = "its deadline" if why is Rejection.DEADLINE else f"{self._policy.max_queue_s:g} s"
        return Unavailable(f"{why_late}: the wait would be longer than {bound}", retry_after_s=retry_s)

    def _retry_after_s(self, ticket: Ticket, over_s: float, room: ClusterRoom) -> float:
        return self._retry.retry_after_s(ticket.cost, over_s, rate=self._rate(room), now_s=self._clock())

    def _wait_s(self, ticket: Ticket, room: ClusterRoom) -> float:
        local, first = room.awaits_reading(ticket.num_tokens), self._queue.first()
        # Whoever cannot pass the first one waits as long as that one.
        if (
            local
            and not self._num_refused()
            and (first is None or room.awaits_reading(first.num_tokens) or self._may_be_passed(first, room))
        ):
            return self._queue.within(local.most_tokens) / local.tokens_per_s + local.wait_s
        if not len(self._queue) and self._has_room(room, ticket):
            return room.least_wait_s
        ahead = self._queue.ahead_of(ticket, credit=self._credit(ticket, room))
        return (ahead.cost + ticket.cost) / self._rate(room) + room.least_wait_s

    def _left_s(self, ticket: Ticket, room: ClusterRoom, now_s: float, patience: float) -> float:
        left_s = ticket.arrived_s + patience * self._policy.max_queue_s - now_s
        if ticket.deadline_s is None:
            return left_s
        return min(left_s, ticket.deadline_s - now_s - room.compute_s(ticket.work_tokens))

    def _credit(self, ticket: Ticket, room: ClusterRoom) -> float:
        away_s = ticket.arrived_s - self._seen_s.get(ticket.tenant, ticket.arrived_s)
        return self._policy.credit_s * self._rate(room) if away_s < self._policy.credit_lapses_s else 0.0

    def _rate(self, room: ClusterRoom) -> float:
        return self._meter.rate(room.prefill_tokens_per_s * self._policy.input_weight)

    def _room(self) -> ClusterRoom:
        transit = InTransit(
            num_requests=len(self._transit),
            work_tokens=sum(entry.ticket.work_tokens for entry in self._transit if not entry.is_local),
            local_tokens=sum(entry.ticket.work_tokens for entry in self._transit if entry.is_local),
        )
        room = look(self._view(), self._policy.room, transit, self._clock())
        self._awaited = not room.usable and self._is_due()
        return replace(room, awaited=True) if self._awaited else room

    def _has_room(self, room: ClusterRoom, ticket: Ticket) -> bool:
        return self._lack(room, ticket) is None

    def _lack(self, room: ClusterRoom, ticket: Ticket) -> Lack | None:
        """Why it cannot run now; None: it can, or never will."""
        if not room.ever_holds(ticket.num_tokens):
            return None
        lack = room.lack(ticket.num_tokens)
        if self._num_refused():
            return Lack.DECODE if lack is None else lack.and_decode()
        if lack is None and self._places(ticket.priority) <= len(self._transit):
            return Lack.ROUTER
        return lack

    def _pass_time(self) -> None:
        # How fast the queue drains is not learned while there is nobody to drain it.
        self._meter.passed(self._clock(), busy=len(self._queue) > 0 and not self._awaited)

    def _give_turn(self, entry: Entry) -> None:
        entry.waiting, entry.had_turn, entry.in_transit = False, True, True
        self._transit.add(entry)
        self._counters.served(entry.ticket.tenant, input_tokens=entry.ticket.work_tokens)
        self.counts.waited(self._clock() - entry.ticket.arrived_s)
