"""The prefill worker from which each decode worker would get its prompt, and what that costs. Pure.

Where all links are alike the cost of a pair separates, and the cheapest prefill worker is the same for all decode
workers of a kind. Where they differ (`router/workers/pair_links.py`), every decode worker has the one that is cheapest
with the link between the two.
"""

from collections.abc import Sequence
from math import copysign
from random import Random

import numpy as np
from msgspec import Struct

from router.placement.costs import CostModel
from router.placement.pool_costs import Column, PoolCosts
from router.workers.columns import Bools, ClusterView, Floats
from router.workers.pair_links import PairLinks

NUM_PRICED_EXACTLY = 24
"""Of many decode workers, how many are priced with every prefill worker: those that could be cheapest with their
fastest link. The others have an upper bound as their price."""

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least = np.minimum.reduce


class Partner(Struct, frozen=True, kw_only=True):
    """The prefill worker of a pair."""

    row: int
    cost_ms: float
    """Cost of the worker itself, without the hand-off's."""


class AlikePartners:
    """The cheapest prefill worker for each kind of decode worker: links make no difference."""

    def __init__(self, costs: PoolCosts, view: ClusterView, model: CostModel, rng: Random) -> None:
        self._members = view.decode.members
        self._found: list[Partner | None] = []
        self.cost_ms: list[float] = []
        """The partner's cost, by kind of decode worker; infinite where none can pair."""
        for able in view.partners:
            partner = best_partner(costs, able, model, rng)
            self._found.append(partner)
            self.cost_ms.append(np.inf if partner is None else partner.cost_ms)

    def price(self, row: int, uncached: float, transfer_ms: float) -> tuple[float, float]:
        """Return what the partner of one decode worker costs, of which nothing is their link's."""
        return self.cost_ms[self._members.kind_list[row]], 0.0

    def prices(
        self, uncached: Floats, transfer_ms: Floats, load_ms: Floats, here_ms: Floats
    ) -> tuple[float | Floats, Floats | None]:
        """Return what the partner of every decode worker costs, or one number for all; see `LinkedPartners`."""
        cost_ms = self.cost_ms
        return cost_ms[0] if len(cost_ms) == 1 else np.array(cost_ms)[self._members.kinds], None

    def find(self, row: int, uncached: float, transfer_ms: float) -> Partner | None:
        """Return the prefill worker of one decode worker; None: none can pair."""
        return self._found[self._members.kind_list[row]]


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
    least_ms = float(_least(total)) if isinstance(total, np.ndarray) else min(total)
    # The highest cost that ties with the lowest, which is below zero where a link saves more than its worker costs.
    bound_ms = least_ms * (1.0 + copysign(model.tie_share, least_ms)) + model.tie_ms
    rows: list[int] = []
    if isinstance(total, np.ndarray):
        rows = (total <= bound_ms).nonzero()[0].tolist()
    else:
        for row, cost in enumerate(total):
            if cost <= bound_ms:
                rows.append(row)
    if len(rows) > 1:
        most = max(map(held.__getitem__, rows))
        rows = [row for row in rows if held[row] == most]
    if len(rows) > 1:
        waiting = min(map(load.__getitem__, rows)) + model.tie_ms
        rows = [row for row in rows if load[row] <= waiting]
    return rows[0] if len(rows) == 1 else rng.choice(rows)


class LinkedPartners:
    """The prefill worker that is cheapest for each decode worker with the link between the two."""

    def __init__(self, costs: PoolCosts, view: ClusterView, links: PairLinks, model: CostModel, rng: Random) -> None:
        self._costs = costs
        self._view = view
        self._links = links
        self._model = model
        self._rng = rng
        self._total = np.asarray(costs.total)

    def price(self, row: int, uncached: float, transfer_ms: float) -> tuple[float, float]:
        """Return the cost of the best prefill worker for one decode worker, and how much of it is their link's.

        `uncached`: tokens whose KV must get there, in `transfer_ms` over its usual link. Infinite: none can pair.
        """
        pairs = self._pairs_ms(row, uncached, transfer_ms)
        costs = self._total + pairs
        best = int(costs.argmin())
        return (float(costs[best]), float(pairs[best])) if costs[best] < np.inf else (np.inf, 0.0)

    def prices(
        self, uncached: Floats, transfer_ms: Floats, load_ms: Floats, here_ms: Floats
    ) -> tuple[float | Floats, Floats | None]:
        """Return the same for all decode workers; None: links make no difference.

        The decode workers that could be cheapest are priced with every partner, the others with the cheapest one over
        the slowest of their links. `load_ms`, `here_ms`: what the worker's load and local prefill would cost, to tell
        which could be cheapest.
        """
        links, view = self._links, self._view
        able = [self._total if rows is None else np.where(rows, self._total, np.inf) for rows in view.partners]
        cheapest = np.array([_least(costs) for costs in able])[view.decode.members.kinds]
        fastest = cheapest + np.maximum(links.least_ms * uncached, -transfer_ms)
        pairs = np.maximum(links.most_ms * uncached, -transfer_ms)
        costs = cheapest + pairs
        least = load_ms + np.minimum(here_ms, transfer_ms + fastest)
        rows = least.argpartition(min(NUM_PRICED_EXACTLY, len(costs) - 1))[:NUM_PRICED_EXACTLY]
        pairs_ms = np.maximum(
            np.stack([links.column(row) for row in rows.tolist()]) * uncached[rows, None], -transfer_ms[rows, None]
        )
        whole = self._total + pairs_ms
        best = whole.argmin(axis=1)
        each = np.arange(len(rows))
        costs[rows], pairs[rows] = whole[each, best], pairs_ms[each, best]
        return costs, np.where(costs < np.inf, pairs, 0.0)

    def find(self, row: int, uncached: float, transfer_ms: float) -> Partner | None:
        """Choose the prefill worker of one decode worker; None: none can pair."""
        costs = self._total + self._pairs_ms(row, uncached, transfer_ms)
        found = pick(costs, self._costs.held, self._costs.load, self._model, self._rng)
        return None if costs[found] == np.inf else Partner(row=found, cost_ms=float(costs[found]))

    def _pairs_ms(self, row: int, uncached: float, transfer_ms: float) -> Floats:
        # A link saves no more than the whole transfer.
        pairs: Floats = np.maximum(self._links.column(row) * uncached, -transfer_ms)
        return pairs


Partners = AlikePartners | LinkedPartners


def partners_of(
    costs: PoolCosts, view: ClusterView, links: PairLinks | None, model: CostModel, rng: Random
) -> Partners:
    """Return the partners for one decision, whose prefill workers have these costs; there is at least one."""
    if links is None:
        return AlikePartners(costs, view, model, rng)
    return LinkedPartners(costs, view, links, model, rng)
