"""Who holds more of a prompt's prefix than the worker that is to compute it: a hint that saves computing it. Pure.

Whether the prefix is brought from there, or computed again, is that worker's decision: it knows its own rates.
"""

from collections.abc import Iterable

from router.placement import Demand
from router.worker_view import WorkerSnapshot
from tandem.prefix_holder import PrefixHolder

MIN_GAIN_TOKENS = 64
"""Less is computed faster than asked for."""


def best_holder(demand: Demand, computing: WorkerSnapshot, workers: Iterable[WorkerSnapshot]) -> PrefixHolder | None:
    """The worker that holds the longest prefix and can send it to `computing`; None when none holds much more.

    Of equals the one with fewer requests, then the one whose name comes first.
    """
    own = demand.matched_tokens.get(computing.info.key.worker_id, 0)
    able = [
        (demand.matched_tokens.get(worker.info.key.worker_id, 0), -worker.num_active, worker)
        for worker in workers
        if worker.info.key != computing.info.key
        and not worker.draining
        and worker.info.key not in demand.excluded
        and worker.info.handoff_address
        and worker.info.cannot_send_to(computing.info) is None
    ]
    able = [held for held in able if held[0] - own >= MIN_GAIN_TOKENS]
    if not able:
        return None
    num_tokens, _, holder = min(able, key=lambda held: (-held[0], -held[1], held[2].info.key.worker_id))
    return PrefixHolder(
        worker_id=holder.info.key.worker_id,
        incarnation=holder.info.key.incarnation,
        address=holder.info.handoff_address,
        num_tokens=num_tokens,
    )
