"""Prices every worker of both pools for one prompt: one by one where they are few, by columns where they are many.

An operation on an array costs about what ten workers cost one by one. Both ways do the same operations in the same
order, so they compare the same numbers. Only columns are split into terms: an explanation of few workers prices them
again, when it is read, from a copy of the pool's cells. That is one object: the log of decisions keeps many. Pure.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from router.placement.costs import CostModel, filled_in, link_ms, prefill_ms, step_ms
from router.placement.demand import PlacementDemand
from router.placement.partners import Partners
from router.placement.pool_costs import ExplainedCosts, ExplainedDecodeCosts, PoolCosts
from router.workers.columns import Bools, Floats, PoolMembers, PoolView

MAX_PRICED_SINGLY = 8
"""Most workers of a pool that are priced one by one; more are priced by columns."""

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least, _most, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce


_NOTHING = ExplainedCosts(members=PoolMembers([], []), held=np.zeros(0), total=[], terms={})
_NO_COSTS = PoolCosts(held=[], work=[], compute_ms=[], load=[], total=[], explain=lambda: _NOTHING)
"""The costs of a pool without workers."""

_Prices = Callable[[Floats, Floats, Floats, Floats], tuple[float | Floats, Floats | None]]
"""The type of `LinkedPartners.prices`."""


def price_prefill(demand: PlacementDemand, pool: PoolView, model: CostModel) -> PoolCosts:
    """Compute the cost of every prefill worker for this prompt; infinite for those that may not be chosen."""
    if not pool.members.infos:
        return _NO_COSTS
    closed = demand.closed(pool, demand.num_tokens)
    if len(pool.members.infos) <= MAX_PRICED_SINGLY:
        return _price_prefill_singly(demand, pool, closed, model)
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
    # What an available worker need not compute; every other one would compute it again.
    least = _least(charged if closed is None else np.where(closed, _most(charged), charged))
    crowd = model.recompute_weight * _sum(pool.active) / len(total)
    terms["recompute_ms"] = (charged - least) * (token_ms * crowd)
    total += terms["recompute_ms"]
    _add_surcharges(demand, pool, terms, total)
    if closed is not None:
        total[closed] = np.inf
    explained = ExplainedCosts(members=pool.members, held=held, total=total, terms=terms)
    return PoolCosts(held=held, work=work, compute_ms=compute, load=queue, total=total, explain=lambda: explained)


def _price_prefill_singly(demand: PlacementDemand, pool: PoolView, closed: Bools | None, model: CostModel) -> PoolCosts:
    num_tokens, most, members, matched = demand.num_tokens, demand.num_tokens - 1, pool.members, demand.matched
    matched_at = matched.__getitem__ if isinstance(matched, list) else matched.item
    # In the order of `COLUMNS`, as far as they are needed here.
    backlog, active, token_ms, _, _, _, _, growth, penalised_until_s, *_ = pool.cells.tolist()
    if "prefill_ms" in pool.unmeasured:
        token_ms = filled_in(token_ms, 1e3 / model.prior_prefill_tokens_per_s)
    copied = float(min(demand.replicate_tokens, most))
    held: list[float] = []
    work: list[float] = []
    compute: list[float] = []
    queue: list[float] = []
    charged: list[float] = []
    total: list[float] = []
    for row, (slot, size) in enumerate(zip(members.slot_list, members.block_size_list, strict=True)):
        own = float(min(matched_at(slot), most) // size * size)
        uncached = num_tokens - own
        tokens = uncached + growth[row] * uncached * (num_tokens + own)
        waiting, here = backlog[row] * token_ms[row], tokens * token_ms[row]
        held.append(own)
        work.append(tokens)
        queue.append(waiting)
        compute.append(here)
        cost = waiting + here
        if own < copied:
            uncharged = _work_of_one(num_tokens, copied, growth[row]) - tokens
            cost += uncharged * token_ms[row]
            tokens += uncharged
        charged.append(tokens)
        total.append(cost)
    allowed = charged if closed is None else [c for c, shut in zip(charged, closed.tolist(), strict=True) if not shut]
    least, crowd = min(allowed, default=max(charged)), model.recompute_weight * sum(active) / len(total)
    for row, each_ms in enumerate(token_ms):
        total[row] += (charged[row] - least) * (each_ms * crowd)
    _add_loads(demand, members.slot_list, total)
    if closed is not None or pool.penalised_until_s is not None:
        _penalise_and_close(penalised_until_s, closed, demand.now_s, total)
    explain = partial(_explain_prefill, demand, pool, pool.cells.tobytes(), closed, model)
    return PoolCosts(held=held, work=work, compute_ms=compute, load=queue, total=total, explain=explain)


def _explain_prefill(
    demand: PlacementDemand, pool: PoolView, cells: bytes, closed: Bools | None, model: CostModel
) -> ExplainedCosts:
    return _price_prefill_by_columns(demand, pool.over(cells), closed, model).explain()


def price_decode(
    demand: PlacementDemand, pool: PoolView, closed: Bools | None, partners: Partners | None, model: CostModel
) -> PoolCosts:
    """Compute the cost of every decode worker with the cheaper of local prefill and a hand-off.

    `closed`: workers that may not be chosen. `partners`: None where there is no prefill pool, so that prompts are
    computed, and copies of prefixes made, here.
    """
    if len(pool.members.infos) <= MAX_PRICED_SINGLY:
        return _price_decode_singly(demand, pool, closed, partners, model)
    return _price_decode_by_columns(demand, pool, closed, None if partners is None else partners.prices, model)


def _price_decode_by_columns(
    demand: PlacementDemand, pool: PoolView, closed: Bools | None, prices: _Prices | None, model: CostModel
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
    here = queue + compute + stall
    local_terms: dict[str, Floats] = {"queue_ms": queue, "compute_ms": compute, "stall_ms": stall}
    if demand.replicate_tokens and prices is None:
        local_terms["copy_ms"] = _uncharged(demand, held, work, pool) * token_ms
        here = here + local_terms["copy_ms"]
    if prices is None:
        # No prompt is handed off: nothing is transferred, and an explanation shows hand-offs as endless.
        transfer, pair, remote = np.zeros(len(here)), None, np.full(len(here), np.inf)
        local, total = np.ones(len(here), dtype=np.bool_), load + here
    else:
        transfer = uncached * link_ms(pool, model)
        partner_ms, pair = prices(uncached, transfer, load, here)
        remote = transfer + (partner_ms + model.handoff_ms)
        local = _prefer_local_prefill(demand, uncached, here, remote, model)
        total = load + np.where(local, here, remote)
    _add_surcharges(demand, pool, terms, total)
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
    demand: PlacementDemand, pool: PoolView, closed: Bools | None, partners: Partners | None, model: CostModel
) -> PoolCosts:
    num_tokens, most, members, matched = demand.num_tokens, demand.num_tokens - 1, pool.members, demand.matched
    matched_at = matched.__getitem__ if isinstance(matched, list) else matched.item
    # In the order of `COLUMNS`, as far as they are needed here.
    backlog, active, token_ms, steps, links, free, relief, growth, penalised_until_s, *_ = pool.cells.tolist()
    if "prefill_ms" in pool.unmeasured:
        token_ms = filled_in(token_ms, 1e3 / model.prior_prefill_tokens_per_s)
    if "step_ms" in pool.unmeasured:
        steps = filled_in(steps, 1e3 * model.prior_decode_step_s)
    if "link_ms" in pool.unmeasured and partners is not None:
        links = link_ms(pool, model).tolist()
    itl_steps = model.itl_share * model.itl_horizon_tokens
    copied = float(min(demand.replicate_tokens, most)) if partners is None else 0.0
    held: list[float] = []
    work: list[float] = []
    compute: list[float] = []
    load: list[float] = []
    total: list[float] = []
    local: list[bool] = []
    transfers: list[float] = []
    priced: list[tuple[float, float]] = []
    for row, (slot, size) in enumerate(zip(members.slot_list, members.block_size_list, strict=True)):
        own = float(min(matched_at(slot), most) // size * size)
        uncached = num_tokens - own
        tokens = uncached + growth[row] * uncached * (num_tokens + own)
        reading, waiting = tokens * token_ms[row], steps[row] * active[row] * itl_steps
        if uncached > free[row]:
            waiting = (uncached - free[row]) * steps[row] * relief[row] + waiting
        here = backlog[row] * token_ms[row] + reading + reading * (max(active[row], 1.0) * model.stall_share)
        if own < copied:
            here += (_work_of_one(num_tokens, copied, growth[row]) - tokens) * token_ms[row]
        held.append(own)
        work.append(tokens)
        compute.append(reading)
        load.append(waiting)
        if partners is not None:
            transfer = uncached * links[row]
            of_partner = partners.price(row, uncached, transfer)
            remote = transfer + (of_partner[0] + model.handoff_ms)
            is_local = prefers_local_prefill(demand, uncached, local_ms=here, remote_ms=remote, model=model)
            transfers.append(transfer)
            priced.append(of_partner)
            local.append(is_local)
            here = here if is_local else remote
        total.append(waiting + here)
    _add_loads(demand, members.slot_list, total)
    if closed is not None or pool.penalised_until_s is not None:
        _penalise_and_close(penalised_until_s, closed, demand.now_s, total)
    return PoolCosts(
        held=held,
        work=work,
        compute_ms=compute,
        load=load,
        total=total,
        explain=partial(_explain_decode, demand, pool, pool.cells.tobytes(), closed, priced, model),
        transfer_ms=transfers or None,
        local=local or None,
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


def _explain_decode(
    demand: PlacementDemand,
    pool: PoolView,
    cells: bytes,
    closed: Bools | None,
    priced: list[tuple[float, float]],
    model: CostModel,
) -> ExplainedCosts:
    then = pool.over(cells)
    if not priced:
        return _price_decode_by_columns(demand, then, closed, None, model).explain()
    partner_ms, pair = np.array(priced).T
    return _price_decode_by_columns(demand, then, closed, lambda *_: (partner_ms, pair), model).explain()


def _penalise_and_close(until_s: list[float], closed: Bools | None, now_s: float, total: list[float]) -> None:
    for row, one_s in enumerate(until_s):
        total[row] += max(one_s - now_s, 0.0) * 1e3
    for row in () if closed is None else closed.nonzero()[0].tolist():
        total[row] = np.inf


def _add_loads(demand: PlacementDemand, slots: list[int], total: list[float]) -> None:
    if demand.adapter_ms is not None:
        for row, slot in enumerate(slots):
            total[row] += demand.adapter_ms[slot]


def _add_surcharges(demand: PlacementDemand, pool: PoolView, terms: dict[str, Floats], total: Floats) -> None:
    if demand.adapter_ms is not None:
        terms["adapter_ms"] = np.array(demand.adapter_ms)[pool.members.slots]
        total += terms["adapter_ms"]
    if pool.penalised_until_s is not None:
        terms["penalty_ms"] = np.maximum(pool.penalised_until_s - demand.now_s, 0.0) * 1e3
        total += terms["penalty_ms"]


def held_tokens(demand: PlacementDemand, pool: PoolView) -> Floats:
    """Return tokens that need not be computed: whole physical blocks, never the last token, whose logits are needed."""
    members = pool.members
    # Float from here on: operations that mix it with integers would convert it each time.
    held: Floats = (
        np.minimum(np.asarray(demand.matched)[members.slots], demand.num_tokens - 1)
        // members.block_sizes
        * members.tokens
    )
    return held


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
