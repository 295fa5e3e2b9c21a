"""Who gives way when the queue is full: of the worst priority the end of the longest line. Pure."""

from router.admission.fair_queue import FairQueue, Ticket
from router.admission.fair_share import VirtualCounters
from router.admission.types import AdmissionPolicy


def select_victims(
    ticket: Ticket, queue: FairQueue, counters: VirtualCounters, policy: AdmissionPolicy
) -> list[Ticket] | None:
    """Those that must give way so that it may wait; None: they would not suffice, or come before it."""
    num_waiting, num_tokens = len(queue), queue.num_tokens + ticket.num_tokens
    found: list[Ticket] = []
    for victim, line_cost in queue.given_up():
        if num_waiting < policy.max_requests and num_tokens <= policy.max_tokens:
            break
        if not _displaces(ticket, victim, line_cost, queue, counters):
            return None
        found.append(victim)
        num_waiting, num_tokens = num_waiting - 1, num_tokens - victim.num_tokens
    return found


def _displaces(ticket: Ticket, victim: Ticket, line_cost: float, queue: FairQueue, counters: VirtualCounters) -> bool:
    if victim.priority != ticket.priority:
        return victim.priority > ticket.priority
    own = queue.line_cost(ticket.tenant, ticket.priority) + ticket.cost / counters.weight(ticket.tenant)
    return ticket.tenant != victim.tenant and own < line_cost
