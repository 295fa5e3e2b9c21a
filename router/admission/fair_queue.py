"""The queue of requests that wait for their turn: by priority, then by the tenant served least, then by deadline.

Pure. Deadlines take precedence in another way: the queue's owner (`router/admission/fair_admission.py`) removes a
request that can no longer meet its deadline, so every request here can still be served in time.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from router.admission.fair_share import VirtualCounters


class Ticket(Struct, kw_only=True, eq=False):
    """A request that waits, or has waited."""

    tenant: str
    priority: int
    num_tokens: int
    """Tokens of its prompt."""
    work_tokens: float
    """Prompt tokens that are expected to be computed."""
    output_tokens: float
    """Tokens expected, over all choices."""
    cost: float
    """Expected cost in fair shares, before weights."""
    number: int
    """Position in order of arrival."""
    arrived_s: float
    deadline_s: float | None
    """Deadline of its first token."""
    is_overtaken: bool = False
    """Whether others had their turn while it was first in line."""

    @property
    def rank(self) -> tuple[float, int]:
        """Return the sort key within its tenant and priority."""
        return (float("inf") if self.deadline_s is None else self.deadline_s, self.number)


class Ahead(NamedTuple):
    """The work served before a request."""

    cost: float
    work_tokens: float


class EvictionCandidate(NamedTuple):
    """A request that may be evicted when the queue is full."""

    ticket: Ticket
    line_cost: float
    """Cost over weight of its tenant's line, up to and including itself."""


class _Line:
    """The queued requests of one tenant and priority."""

    __slots__ = ("cost", "tickets", "work_tokens")

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.cost = 0.0
        self.work_tokens = 0.0

    def add(self, ticket: Ticket) -> None:
        insort(self.tickets, ticket, key=_rank)
        self.cost += ticket.cost
        self.work_tokens += ticket.work_tokens

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[bisect_left(self.tickets, ticket.rank, key=_rank)]
        self.cost -= ticket.cost
        self.work_tokens -= ticket.work_tokens

    def before(self, rank: tuple[float, int]) -> Ahead:
        if not self.tickets or self.tickets[-1].rank < rank:
            return Ahead(self.cost, self.work_tokens)
        found = self.tickets[: bisect_left(self.tickets, rank, key=_rank)]
        return Ahead(sum(t.cost for t in found), sum(t.work_tokens for t in found))


def _rank(ticket: Ticket) -> tuple[float, int]:
    return ticket.rank


class FairQueue:
    """All requests that wait. Its owner enforces the bounds."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._classes: dict[int, dict[str, _Line]] = {}
        self.num_requests = 0
        self.num_tokens = 0
        """Sum over all waiting prompts."""
        self._lengths: list[int] = []
        """Lengths of the waiting prompts, in order."""

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate by priority and tenant."""
        for priority in sorted(self._classes):
            for line in self._classes[priority].values():
                yield from line.tickets

    @property
    def tenants(self) -> set[str]:
        """The tenants with waiting requests."""
        return {tenant for lines in self._classes.values() for tenant in lines}

    def push(self, ticket: Ticket, *, credit: float = 0.0) -> None:
        """Queue a ticket; the counter of a tenant that had nothing queued is lifted to the others', minus `credit`."""
        tenants = self.tenants
        if ticket.tenant not in tenants:
            self._counters.activate(ticket.tenant, tenants, credit=credit)
        self._classes.setdefault(ticket.priority, {}).setdefault(ticket.tenant, _Line()).add(ticket)
        self.num_requests += 1
        self.num_tokens += ticket.num_tokens
        insort(self._lengths, ticket.num_tokens)

    def remove(self, ticket: Ticket) -> None:
        lines = self._classes[ticket.priority]
        lines[ticket.tenant].remove(ticket)
        if not lines[ticket.tenant].tickets:
            del lines[ticket.tenant]
            if not lines:
                del self._classes[ticket.priority]
        self.num_requests -= 1
        self.num_tokens -= ticket.num_tokens
        del self._lengths[bisect_left(self._lengths, ticket.num_tokens)]

    def first(self) -> Ticket | None:
        """Return the ticket whose turn is next."""
        if not self._classes:
            return None
        lines = self._classes[min(self._classes)]
        tenant = min(lines, key=lambda one: (self._counters.counter(one), lines[one].tickets[0].number))
        return lines[tenant].tickets[0]

    def first_within(self, most_tokens: float) -> Ticket | None:
        """Return the ticket whose turn would be next if no longer prompts than `most_tokens` waited."""
        if not self._lengths or self._lengths[0] > most_tokens:
            return None
        for _, lines in sorted(self._classes.items()):
            found = [
                (self._counters.counter(tenant), line.tickets[0].number, ticket)
                for tenant, line in lines.items()
                if (ticket := next((t for t in line.tickets if t.num_tokens <= most_tokens), None)) is not None
            ]
            if found:
                return min(found, key=lambda one: one[:2])[2]
        return None

    def within(self, most_tokens: float) -> float:
        """Sum the work, in tokens, of all prompts of at most `most_tokens`."""
        if not self._lengths or self._lengths[0] > most_tokens:
            return 0.0
        return sum(ticket.work_tokens for ticket in self if ticket.num_tokens <= most_tokens)

    def ahead_of(self, ticket: Ticket, *, credit: float = 0.0) -> Ahead:
        """Compute what is served before a request, whether it waits already or not.

        Its turn comes when its tenant's counter has taken in everything that the tenant has queued before it; every
        other tenant is served until its own counter has come as far. Takes time linear in the number of waiting
        tenants.
        """
        counters, tenant = self._counters, ticket.tenant
        cost, work = 0.0, 0.0
        for priority, lines in self._classes.items():
            if priority < ticket.priority:
                cost += sum(line.cost for line in lines.values())
                work += sum(line.work_tokens for line in lines.values())
        lines = self._classes.get(ticket.priority, {})
        own = lines[tenant].before(ticket.rank) if tenant in lines else Ahead(0.0, 0.0)
        waiting = self.tenants
        begins = counters.counter(tenant) if tenant in waiting else counters.lifted(tenant, waiting, credit=credit)
        turn = begins + own.cost / counters.weight(tenant)
        for other, line in lines.items():
            if other != tenant and line.cost > 0.0:
                share = min(1.0, max(0.0, turn - counters.counter(other)) * counters.weight(other) / line.cost)
                cost += share * line.cost
                work += share * line.work_tokens
        return Ahead(cost + own.cost, work + own.work_tokens)

    def eviction_order(self) -> Iterator[EvictionCandidate]:
        """Iterate over all tickets in the order in which to evict them: each is the last of the line that is then the
        longest (by cost over weight) of the worst priority. Removes nothing.
        """
        for _, lines in sorted(self._classes.items(), reverse=True):
            lasts = {tenant: reversed(line.tickets) for tenant, line in lines.items()}
            costs = {tenant: line.cost / self._counters.weight(tenant) for tenant, line in lines.items()}
            while costs:
                _, longest = max(zip(costs.values(), costs, strict=True))
                if (ticket := next(lasts[longest], None)) is None:
                    del costs[longest]
                    continue
                yield EvictionCandidate(ticket, costs[longest])
                costs[longest] -= ticket.cost / self._counters.weight(longest)

    def line_cost(self, tenant: str, priority: int) -> float:
        """Return the cost of a tenant's line over its weight."""
        line = self._classes.get(priority, {}).get(tenant)
        return 0.0 if line is None else line.cost / self._counters.weight(tenant)
