"""Finds the worker that holds more of a prompt's prefix than the one chosen to compute it. Pure.

Whether to fetch the prefix from there or compute it again is decided by the computing worker, which knows its own
rates.
"""

from collections.abc import Callable, Iterator

import numpy as np

from router.placement.demand import PlacementDemand
from router.types.worker_view import WorkerInfo
from router.workers.columns import ClusterView
from tandem.values.ids import WorkerId
from tandem.values.prefix_holder import PrefixHolder

MIN_GAIN_TOKENS = 64
"""Fewer tokens than this are computed faster than fetched."""

Confirmed = Callable[[WorkerId, int], int]
"""Returns how many of the leading tokens that a worker is thought to hold are confirmed by its events."""
_Order = tuple[int, bool, int, WorkerId]


def best_holder(
    demand: PlacementDemand, computing: WorkerInfo, view: ClusterView, confirmed: Confirmed
) -> PrefixHolder | None:
    """Return the worker that holds the longest prefix and can send it to `computing`; None when none holds much more.

    A worker cannot lend what it is only about to compute. Among equals: one that stays, then the one with fewer
    requests, then by name; a draining worker lends as long as it is connected.
    """
    own, matched = 0, demand.matched
    for pool in (view.prefill, view.decode):
        if (row := pool.members.rows.get(computing.key)) is not None:
            own = int(matched[pool.members.slot_list[row]])
    most = max(matched, default=0) if isinstance(matched, list) else np.maximum.reduce(matched, initial=0)
    if most < own + MIN_GAIN_TOKENS:
        return None
    # Workers that keep windowed layers apart fetch nothing; a hint would cost the prompt a turn of the engine.
    if demand.only is not None or computing.layout.windowed_layers:
        return None
    # Sorted by the upper bound of each: most are never checked for what is confirmed.
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


def _by_bound(demand: PlacementDemand, view: ClusterView, least: int) -> Iterator[tuple[_Order, WorkerInfo]]:
    """Yield the workers thought to hold at least `least` tokens, best first: the best have the smallest order."""
    found: list[tuple[_Order, WorkerInfo]] = []
    matched = np.asarray(demand.matched)
    for pool in (view.decode, view.prefill):
        thought = matched[pool.members.slots]
        rows = (thought >= least).nonzero()[0]
        if not len(rows):
            continue
        closed = np.zeros(len(rows), np.bool_) if pool.open is None else ~pool.open[rows]
        for row, tokens, draining, active in zip(
            rows.tolist(), thought[rows].tolist(), closed.tolist(), pool.active[rows].tolist(), strict=True
        ):
            info = pool.members.infos[row]
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
