"""Who holds more of a prompt's prefix than the worker that is to compute it: a hint that saves computing it. Pure.

Whether the prefix is brought from there, or computed again, is that worker's decision: it knows its own rates.
"""

from collections.abc import Callable, Iterable
from operator import itemgetter

from router.placement import Demand
from router.worker_view import WorkerSnapshot
from tandem.ids import WorkerId
from tandem.prefix_holder import PrefixHolder

MIN_GAIN_TOKENS = 64
"""Less is computed faster than asked for."""

Confirmed = Callable[[WorkerId, int], int]
"""Of so many leading tokens that a worker is thought to hold, those that it has said it holds."""
_Order = tuple[int, bool, int, WorkerId]


def best_holder(
    demand: Demand, computing: WorkerSnapshot, workers: Iterable[WorkerSnapshot], confirmed: Confirmed
) -> PrefixHolder | None:
    """The worker that holds the longest prefix and can send it to `computing`; None when none holds much more.

    What a worker is only about to compute it cannot lend. Of equals one that stays, then the one with fewer requests,
    then the one whose name comes first: a draining worker lends as long as it is there.
    """
    own = demand.matched_tokens.get(computing.info.key.worker_id, 0)
    able = [
        worker
        for worker in workers
        if demand.matched_tokens.get(worker.info.key.worker_id, 0) - own >= MIN_GAIN_TOKENS
        and worker.info.key != computing.info.key
        and worker.info.key not in demand.excluded
        and worker.info.handoff_address
        and worker.info.cannot_send_to(computing.info) is None
    ]
    # By what each may hold at most: most are never asked what of it is confirmed.
    best: tuple[_Order, WorkerSnapshot] | None = None
    for bound, worker in sorted(((_order(_thought(demand, each), each), each) for each in able), key=itemgetter(0)):
        if best is not None and best[0] <= bound:
            break
        order = _order(confirmed(worker.info.key.worker_id, _thought(demand, worker)), worker)
        if best is None or order < best[0]:
            best = order, worker
    if best is None or (num_tokens := -best[0][0]) - own < MIN_GAIN_TOKENS:
        return None
    holder = best[1]
    return PrefixHolder(
        worker_id=holder.info.key.worker_id,
        incarnation=holder.info.key.incarnation,
        address=holder.info.handoff_address,
        num_tokens=num_tokens,
    )


def _thought(demand: Demand, worker: WorkerSnapshot) -> int:
    return demand.matched_tokens[worker.info.key.worker_id]


def _order(num_tokens: int, worker: WorkerSnapshot) -> _Order:
    """The best is the least."""
    return -num_tokens, worker.draining, worker.num_active, worker.info.key.worker_id
