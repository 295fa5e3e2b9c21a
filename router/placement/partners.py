"""The prefill worker from which each decode worker would get its prompt, and what that costs. Pure.

Where all links are alike the cost of a pair separates, and the cheapest prefill worker is the same for all decode
workers of a kind. Where they differ (`router/workers/pair_links.py`), every decode worker has the one that is cheapest
with the link between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from router.placement.costs import CostModel
from router.placement.pool_costs import Column, PoolCosts
from router.workers.columns import Bools, ClusterView, Floats

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least = np.minimum.reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """The prefill worker of a pair."""

    row: int
    cost_ms: float
    """Its own cost, without the hand-off's."""


class Partners(Protocol):
    def cost_ms(self, row: int, uncached: float, transfer_ms: float) -> float:
        """Return the least cost of a prefill worker for one decode worker, with the difference that their link makes.

        `uncached`: tokens whose KV must get there, in `transfer_ms` over its usual link. Infinite: none can pair.
        """
        ...

    def costs_ms(self, uncached: Floats, transfer_ms: Floats) -> float | Floats:
        """Return the same for all decode workers, or one number for all of them."""
        ...

    def find(self, row: int, uncached: float, transfer_ms: float) -> Partner | None:
        """Choose the prefill worker of one decode worker; None: none can pair."""
        ...


class AlikePartners:
    """The cheapest prefill worker for each kind of decode worker: links make no difference."""

    def __init__(self, costs: PoolCosts, view: ClusterView, model: CostModel, rng: Random) -> None:
        self._kinds = view.decode.members.kinds
        self._kind_list = view.decode.members.kind_list
        self._found = [best_partner(costs, able, model, rng) for able in view.partners]
        self._cost_ms = [np.inf if partner is None else partner.cost_ms for partner in self._found]

    def cost_ms(self, row: int, uncached: float, transfer_ms: float) -> float:
        return self._cost_ms[self._kind_list[row]]

    def costs_ms(self, uncached: Floats, transfer_ms: Floats) -> float | Floats:
        if len(self._cost_ms) == 1:
            return self._cost_ms[0]
        return np.array(self._cost_ms)[self._kinds]

    def find(self, row: int, uncached: float, transfer_ms: float) -> Partner | None:
        return self._found[self._kind_list[row]]


def best_partner(costs: PoolCosts, able: Bools | None, model: CostModel, rng: Random) -> Partner | None:
    """Choose the cheapest prefill worker of those that are `able`; None: there is none."""
    if not len(costs.total):
        return None
    total = costs.total
    if able is not None:
        total = np.where(able, total, np.inf) if isinstance(total, np.ndarray) else _masked(total, able.tolist())
    row = pick(total, costs.held, costs.load, model, rng)
    cost_ms = float(total[row])
    return None if cost_ms == np.inf else Partner(row=row, cost_ms=cost_ms)


def _masked(total: Sequence[float], able: Sequence[bool]) -> list[float]:
    return [cost if is_able else np.inf for cost, is_able in zip(total, able, strict=True)]


def pick(total: Column, held: Column, load: Column, model: CostModel, rng: Random) -> int:
    """Pick, of the workers tied for the lowest cost, the one that holds most; then the least loaded; then at random."""
    if isinstance(total, np.ndarray):
        bound = _least(total) * (1.0 + model.tie_share) + model.tie_ms
        rows: list[int] = (total <= bound).nonzero()[0].tolist()
    else:
        bound = min(total) * (1.0 + model.tie_share) + model.tie_ms
        rows = [row for row, cost in enumerate(total) if cost <= bound]
    if len(rows) > 1:
        most = max([held[row] for row in rows])
        rows = [row for row in rows if held[row] == most]
    if len(rows) > 1:
        waiting = min([load[row] for row in rows]) + model.tie_ms
        rows = [row for row in rows if load[row] <= waiting]
    return rows[0] if len(rows) == 1 else rows[rng.randrange(len(rows))]
