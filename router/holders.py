"""Who holds more of a prompt's prefix than the worker that is to compute it: a hint that saves computing it. Pure.

Whether the prefix is brought from there, or computed again, is that worker's decision: it knows its own rates.
"""

from collections.abc import Callable, Iterable

from router.placement import Demand
from router.worker_view import WorkerSnapshot
from tandem.ids import WorkerId
from tandem.prefix_holder import PrefixHolder

MIN_GAIN_TOKENS = 64
"""Less is computed faster than asked for."""

Confirmed = Callable[[WorkerId, int], int]
"""Of so many leading tokens that a worker is thought to hold, those that it has said it holds."""


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
    held = [(_confirmed_tokens(demand, worker, confirmed), worker) for worker in able]
    held = [(num_tokens, worker) for num_tokens, worker in held if num_tokens - own >= MIN_GAIN_TOKENS]
    if not held:
        return None
    num_tokens, holder = min(
        held, key=lambda each: (-each[0], each[1].draining, each[1].num_active, each[1].info.key.worker_id)
    )
    return PrefixHolder(
        worker_id=holder.info.key.worker_id,
        incarnation=holder.info.key.incarnation,
        address=holder.info.handoff_address,
        num_tokens=num_tokens,
    )


def _confirmed_tokens(demand: Demand, worker: WorkerSnapshot, confirmed: Confirmed) -> int:
    worker_id = worker.info.key.worker_id
    return confirmed(worker_id, demand.matched_tokens[worker_id])
