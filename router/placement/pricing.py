"""Prices every worker of both pools for one prompt: one by one where they are few, by columns where they are many.

An operation on an array costs about what ten workers cost one by one. Both ways do the same operations in the same
order, so they compare the same numbers. Only columns are split into terms: an explanation of few workers prices them
again, when it is read. Pure.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from router.placement.costs import CostModel, link_ms, prefill_ms, step_ms
from router.placement.demand import PlacementDemand
from router.placement.partners import Partners
from router.placement.pool_costs import ExplainedCosts, ExplainedDecodeCosts, PoolCosts
from router.workers.columns import Bools, Floats, PoolView

MAX_PRICED_SINGLY = 8
"""Most workers of a pool that are priced one by one; more are priced by columns."""

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least, _most, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce


_Prices = Callable[[Floats, Floats, Floats, Floats], tuple[float | Floats, Floats | None]]
"""The type of `Partners.prices`."""


class _Columns(NamedTuple):
    """The columns that prices depend on, copied."""

    backlog: list[float]
    active: list[float]
    token_ms: list[float]
    attention: list[float]
    penalised_until_s: list[float] | None
    closed: list[bool] | None

    @classmethod
    def copied(cls, pool: PoolView, closed: Bools | None, model: CostModel) -> "_Columns":
        until = pool.penalised_until_s
        return cls(
            pool.backlog.tolist(),
            pool.active.tolist(),
            prefill_ms(pool, model).tolist(),
            [0.0] * len(pool.members) if pool.attention is None else pool.attention.tolist(),
            None if until is None else until.tolist(),
            None if closed is None else closed.tolist(),
        )

    def view(self, pool: PoolView) -> PoolView:
        """Return a view of the pool as it was."""
        until = self.penalised_until_s
        return replace(
            pool,
            backlog=np.array(self.backlog),
            active=np.array(self.active),
            prefill_ms=np.array(self.token_ms),
            attention=np.array(self.attention) if any(self.attention) else None,
            penalised_until_s=None if until is None else np.array(until),
            unmeasured=frozenset(),
        )


def price_prefill(demand: PlacementDemand, pool: PoolView, model: CostModel) -> PoolCosts:
    """Compute the cost of every prefill worker for this prompt; infinite for those that may not be chosen."""
    closed = demand.closed(pool, demand.num_tokens)
    if len(pool.members) <= MAX_PRICED_SINGLY:
        return _price_prefill_singly(demand, pool, _Columns.copied(pool, closed, model), model)
    return _price_prefill_by_columns(demand, pool, closed, model)


def _price_prefill_by_columns(
    demand: PlacementDemand, pool: PoolView, closed: Bools | None, model: CostModel
) -> PoolCosts:
    held = held_tokens(demand, pool)
    work = _work(demand.num_tokens, held, pool)
    token_ms = prefill_ms(pool, model)
    queue, compute = pool.backlog * token_ms, work * token_ms
    total = queue + compute
    terms: dict[str, Floats] = {"queue_ms": queue, "compute_ms": compute}
    charged = work
    if demand.replicate_tokens:
        uncharged = _uncharged(demand, held, work, pool)
        terms["copy_ms"], charged = uncharged * token_ms, work + uncharged
        total += terms["copy_ms"]
    if len(total):
        # What an available worker need not compute; every other one would compute it again.
        least = _least(charged if closed is None else np.where(closed, _most(charged), charged))
        crowd = model.recompute_weight * _sum(pool.active) / len(total)
        terms["recompute_ms"] = (charged - least) * (token_ms * crowd)
        total += terms["recompute_ms"]
    _add_penalty(demand, pool, terms, total)
    if closed is not None:
        total[closed] = np.inf
    explained = ExplainedCosts(members=pool.members, held=held, total=total, terms=terms)
    return PoolCosts(held=held, work=work, compute_ms=compute, load=queue, total=total, explain=lambda: explained)


def _price_prefill_singly(demand: PlacementDemand, pool: PoolView, columns: _Columns, model: CostModel) -> PoolCosts:
    num_tokens, held, closed = demand.num_tokens, _held_singly(demand, pool), columns.closed
    copied = float(min(demand.replicate_tokens, num_tokens - 1))
    work: list[float] = []
    compute: list[float] = []
    queue: list[float] = []
    charged: list[float] = []
    total: list[float] = []
    for own, token_ms, growth, backlog in zip(held, columns.token_ms, columns.attention, columns.backlog, strict=True):
        tokens = _work_of_one(num_tokens, own, growth)
        waiting, here = backlog * token_ms, tokens * token_ms
        work.append(tokens)
        queue.append(waiting)
        compute.append(here)
        cost = waiting + here
        if own < copied:
            uncharged = _work_of_one(num_tokens, copied, growth) - tokens
            cost += uncharged * token_ms
            tokens += uncharged
        charged.append(tokens)
        total.append(cost)
    if total:
        allowed = charged if closed is None else [c for c, shut in zip(charged, closed, strict=True) if not shut]
        least, crowd = min(allowed, default=max(charged)), model.recompute_weight * sum(columns.active) / len(total)
        for row, token_ms in enumerate(columns.token_ms):
            total[row] += (charged[row] - least) * (token_ms * crowd)
    _penalise_and_close(demand, columns, total)
    explain = partial(_explain_prefill, demand, pool, columns, model)
    return PoolCosts(held=held, work=work, compute_ms=compute, load=queue, total=total, explain=explain)


def _explain_prefill(demand: PlacementDemand, pool: PoolView, columns: _Columns, model: CostModel) -> ExplainedCosts:
    closed = None if columns.closed is None else np.array(columns.closed, dtype=np.bool_)
    return _price_prefill_by_columns(demand, columns.view(pool), closed, model).explain()


def price_decode(
    demand: PlacementDemand, pool: PoolView, closed: Bools | None, partners: Partners, model: CostModel, *, alone: bool
) -> PoolCosts:
    """Compute the cost of every decode worker with the cheaper of local prefill and a hand-off.

    `closed`: workers that may not be chosen. `alone`: there is no prefill pool, so copies of prefixes are made here.
    """
    if len(pool.members) <= MAX_PRICED_SINGLY:
        return _price_decode_singly(demand, pool, _Columns.copied(pool, closed, model), partners, model, alone=alone)
    return _price_decode_by_columns(demand, pool, closed, partners.prices, model, alone=alone)


def _price_decode_by_columns(
    demand: PlacementDemand,
    pool: PoolView,
    closed: Bools | None,
    prices: _Prices,
    model: CostModel,
    *,
    alone: bool,
) -> PoolCosts:
    held = held_tokens(demand, pool)
    uncached = demand.num_tokens - held
    work = _work(demand.num_tokens, held, pool)
    token_ms, step = prefill_ms(pool, model), step_ms(pool, model)
    load = itl = step * pool.active * (model.itl_share * model.itl_horizon_tokens)
    terms: dict[str, Floats] = {"itl_ms": itl}
    if _least(pool.free_tokens) < demand.num_tokens:
        terms["memory_ms"] = np.maximum(uncached - pool.free_tokens, 0.0) * step * pool.relief
        load = terms["memory_ms"] + itl
    compute = work * token_ms
    queue, stall = pool.backlog * token_ms, compute * (np.maximum(pool.active, 1.0) * model.stall_share)
    transfer = uncached * link_ms(pool, model)
    here = queue + compute + stall
    local_terms: dict[str, Floats] = {"queue_ms": queue, "compute_ms": compute, "stall_ms": stall}
    if demand.replicate_tokens and alone:
        local_terms["copy_ms"] = _uncharged(demand, held, work, pool) * token_ms
        here = here + local_terms["copy_ms"]
    partner_ms, pair = prices(uncached, transfer, load, here)
    remote = transfer + (partner_ms + model.handoff_ms)
    local = _prefer_local_prefill(demand, uncached, here, remote, model)
    total = load + np.where(local, here, remote)
    _add_penalty(demand, pool, terms, total)
    if closed is not None:
        total[closed] = np.inf

    def explain() -> ExplainedDecodeCosts:
        by_link = np.zeros(len(total)) if pair is None else pair
        handoff = remote - transfer - by_link
        return ExplainedDecodeCosts(
            members=pool.members,
            held=held,
            total=total,
            terms=terms,
            local=local,
            local_terms=local_terms,
            remote_terms={"transfer_ms": transfer, "handoff_ms": handoff, "pair_ms": by_link},
            num_tokens=demand.num_tokens,
            floor_tokens=model.local_prefill_tokens,
            most_tokens=model.max_local_prefill_tokens,
        )

    return PoolCosts(
        held=held,
        work=work,
        compute_ms=compute,
        load=load,
        total=total,
        explain=explain,
        transfer_ms=transfer,
        local=local,
    )


def _prefer_local_prefill(
    demand: PlacementDemand, uncached: Floats, here: Floats, remote: Floats, model: CostModel
) -> Bools:
    """Decide as `prefers_local_prefill`, for a whole pool of decode workers at once."""
    local: Bools = here <= remote
    if model.max_local_prefill_tokens is not None:
        local &= (uncached <= model.max_local_prefill_tokens) | (remote == np.inf)
    local |= demand.is_local | (uncached <= model.local_prefill_tokens)
    return local


def _price_decode_singly(
    demand: PlacementDemand, pool: PoolView, columns: _Columns, partners: Partners, model: CostModel, *, alone: bool
) -> PoolCosts:
    num_tokens, held = demand.num_tokens, _held_singly(demand, pool)
    itl_steps = model.itl_share * model.itl_horizon_tokens
    copied = float(min(demand.replicate_tokens, num_tokens - 1)) if alone else 0.0
    steps, links = step_ms(pool, model).tolist(), link_ms(pool, model).tolist()
    free, relief = pool.free_tokens.tolist(), pool.relief.tolist()
    work: list[float] = []
    compute: list[float] = []
    load: list[float] = []
    total: list[float] = []
    local: list[bool] = []
    transfers: list[float] = []
    priced: list[tuple[float, float]] = []
    for row, own in enumerate(held):
        token_ms, active, uncached = columns.token_ms[row], columns.active[row], num_tokens - own
        tokens = _work_of_one(num_tokens, own, columns.attention[row])
        reading, waiting = tokens * token_ms, steps[row] * active * itl_steps
        if uncached > free[row]:
            waiting = (uncached - free[row]) * steps[row] * relief[row] + waiting
        transfer = uncached * links[row]
        partner_ms, pair = partners.price(row, uncached, transfer)
        here = columns.backlog[row] * token_ms + reading + reading * (max(active, 1.0) * model.stall_share)
        if own < copied:
            here += (_work_of_one(num_tokens, copied, columns.attention[row]) - tokens) * token_ms
        remote = transfer + (partner_ms + model.handoff_ms)
        is_local = prefers_local_prefill(demand, uncached, local_ms=here, remote_ms=remote, model=model)
        work.append(tokens)
        compute.append(reading)
        load.append(waiting)
        transfers.append(transfer)
        priced.append((partner_ms, pair))
        local.append(is_local)
        total.append(waiting + (here if is_local else remote))
    _penalise_and_close(demand, columns, total)

    def explain() -> ExplainedCosts:
        then = replace(
            columns.view(pool),
            step_ms=np.array(steps),
            link_ms=np.array(links),
            free_tokens=np.array(free),
            relief=np.array(relief),
        )
        closed = None if columns.closed is None else np.array(columns.closed, dtype=np.bool_)
        partner_ms, pair = np.array(priced).T
        again = _price_decode_by_columns(demand, then, closed, lambda *_: (partner_ms, pair), model, alone=alone)
        return again.explain()

    return PoolCosts(
        held=held,
        work=work,
        compute_ms=compute,
        load=load,
        total=total,
        explain=explain,
        transfer_ms=transfers,
        local=local,
    )


def prefers_local_prefill(
    demand: PlacementDemand, uncached: float, *, local_ms: float, remote_ms: float, model: CostModel
) -> bool:
    """Whether a decode worker computes the prompt itself (local prefill), or a prefill worker does (disaggregated).

    `_prefer_local_prefill` decides the same for pools of more than `MAX_PRICED_SINGLY` workers.

    The cheaper of both, within the bounds on uncached tokens; local if the demand or the lack of a partner requires it.
    The demand does where admission let it in as local, the prefill pool being full (`ClusterCapacity.local_prefill`).
    """
    if demand.is_local or uncached <= model.local_prefill_tokens:
        return True
    most = model.max_local_prefill_tokens
    return local_ms <= remote_ms and (most is None or uncached <= most or remote_ms == np.inf)


def _penalise_and_close(demand: PlacementDemand, columns: _Columns, total: list[float]) -> None:
    if columns.penalised_until_s is not None:
        for row, until_s in enumerate(columns.penalised_until_s):
            total[row] += max(until_s - demand.now_s, 0.0) * 1e3
    if columns.closed is not None:
        for row, is_closed in enumerate(columns.closed):
            if is_closed:
                total[row] = np.inf


def _add_penalty(demand: PlacementDemand, pool: PoolView, terms: dict[str, Floats], total: Floats) -> None:
    if pool.penalised_until_s is not None:
        terms["penalty_ms"] = np.maximum(pool.penalised_until_s - demand.now_s, 0.0) * 1e3
        total += terms["penalty_ms"]


def held_tokens(demand: PlacementDemand, pool: PoolView) -> Floats:
    """Return tokens that need not be computed: whole physical blocks, never the last token, whose logits are needed."""
    members = pool.members
    # Float from here on: operations that mix it with integers would convert it each time.
    held: Floats = (
        np.minimum(demand.matched[members.slots], demand.num_tokens - 1) // members.block_sizes * members.tokens
    )
    return held


def _held_singly(demand: PlacementDemand, pool: PoolView) -> list[float]:
    most, matched = demand.num_tokens - 1, demand.matched
    return [
        float(min(matched.item(slot), most) // size * size)
        for slot, size in zip(pool.members.slot_list, pool.members.block_size_list, strict=True)
    ]


def _work(num_tokens: int, held: Floats, pool: PoolView) -> Floats:
    """Return tokens to compute; where reported, each is weighted by the context that it attends to."""
    uncached = num_tokens - held
    if pool.attention is None:
        return uncached
    grown: Floats = uncached + pool.attention * uncached * (num_tokens + held)
    return grown


def _work_of_one(num_tokens: int, held: float, attention: float) -> float:
    uncached = num_tokens - held
    return uncached + attention * uncached * (num_tokens + held)


def _uncharged(demand: PlacementDemand, held: Floats, work: Floats, pool: PoolView) -> Floats:
    """Return the discount, below zero, for workers that lack the prefix that is to be copied."""
    copied = np.maximum(held, min(demand.replicate_tokens, demand.num_tokens - 1))
    return _work(demand.num_tokens, copied, pool) - work
