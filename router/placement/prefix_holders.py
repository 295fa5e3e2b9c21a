"""Who holds more of a prompt's prefix than the worker that is to compute it: a hint that saves computing it. Pure.

Whether the prefix is brought from there, or computed again, is that worker's decision: it knows its own rates.
"""

from collections.abc import Callable, Iterator

import numpy as np

from router.placement.worker_selection import PlacementDemand
from router.types.worker_view import WorkerInfo
from router.workers.columns import ClusterView
from tandem.values.ids import WorkerId
from tandem.values.prefix_holder import PrefixHolder

MIN_GAIN_TOKENS = 64
"""Less is computed faster than asked for."""

Confirmed = Callable[[WorkerId, int], int]
"""Of so many leading tokens that a worker is thought to hold, those that it has said it holds."""
_Order = tuple[int, bool, int, WorkerId]


def best_holder(
    demand: PlacementDemand, computing: WorkerInfo, view: ClusterView, confirmed: Confirmed
) -> PrefixHolder | None:
    """The worker that holds the longest prefix and can send it to `computing`; None when none holds much more.

    What a worker is only about to compute it cannot lend. Of equals one that stays, then the one with fewer requests,
    then the one whose name comes first: a draining worker lends as long as it is there.
    """
    own = _own(demand, computing, view)
    # By what each may hold at most: most are never asked what of it is confirmed.
    best: tuple[_Order, WorkerInfo] | None = None
    for bound, info in _by_bound(demand, view, own + MIN_GAIN_TOKENS):
        if best is not None and best[0] <= bound:
            break
        if not _can_lend(info, computing, demand):
            continue
        order = (-confirmed(info.key.worker_id, -bound[0]), *bound[1:])
        if best is None or order < best[0]:
            best = order, info
    if best is None or (num_tokens := -best[0][0]) - own < MIN_GAIN_TOKENS:
        return None
    key, address = best[1].key, best[1].handoff_address
    return PrefixHolder(worker_id=key.worker_id, incarnation=key.incarnation, address=address, num_tokens=num_tokens)


def _own(demand: PlacementDemand, computing: WorkerInfo, view: ClusterView) -> int:
    for pool in (view.prefill, view.decode):
        if (row := pool.roster.rows.get(computing.key)) is not None:
            return int(demand.matched[pool.roster.slots[row]])
    return 0


def _by_bound(demand: PlacementDemand, view: ClusterView, least: int) -> Iterator[tuple[_Order, WorkerInfo]]:
    """Who is thought to hold at least so much, best first: the order of the best is the least."""
    found: list[tuple[_Order, WorkerInfo]] = []
    for pool in (view.decode, view.prefill):
        thought = demand.matched[pool.roster.slots]
        rows = (thought >= least).nonzero()[0]
        if not len(rows):
            continue
        closed = np.zeros(len(rows), np.bool_) if pool.open is None else ~pool.open[rows]
        for row, tokens, draining, active in zip(
            rows.tolist(), thought[rows].tolist(), closed.tolist(), pool.active[rows].tolist(), strict=True
        ):
            info = pool.roster.infos[row]
            found.append(((-tokens, draining, int(active), info.key.worker_id), info))
    found.sort(key=lambda each: each[0])
    return iter(found)


def _can_lend(info: WorkerInfo, computing: WorkerInfo, demand: PlacementDemand) -> bool:
    return (
        info.key != computing.key
        and info.key not in demand.excluded
        and info.handoff_address != ""
        and info.cannot_send_to(computing) is None
    )
