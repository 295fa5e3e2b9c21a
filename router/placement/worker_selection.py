"""Selects the workers that prefill and decode a prompt, and whether prefill is local or remote. Pure.

Filters first, then one cost in milliseconds, then a pick.

The cost of a pair is predicted from measured rates. The worker that computes the prompt has its queue and the uncached
suffix to compute; a hand-off has its fixed cost and the KV bytes that the decode worker lacks, at the rate at which
they arrive there; the decode worker has its wait for memory and what one more sequence adds to the others' inter-token
latency. If it computes the prompt itself, that also delays all of its streams: a hand-off is weighed against that
price, worker by worker. Given that the two can pair, the cost separates, so the joint choice takes time linear in the
number of workers, and each step is one operation on a whole pool.

A worker that holds a prefix wins by the tokens it need not compute, until its queue costs more than computing them
elsewhere. Recomputing what another worker has cached costs other requests, too: they wait for it, the more the longer
the queue, and it evicts blocks of theirs. A policy that minimised only each request's own wait would lengthen
everyone's.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

import numpy as np

from router.placement.costs import CandidateCost, CandidateCosts, DecodeCosts, PoolCosts, link_ms, prefill_ms, step_ms
from router.placement.costs import CostModel as CostModel
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.columns import Bools, ClusterView, Floats, Ints, PoolView
from tandem.errors import RequestTooLarge
from tandem.values.roles import WorkerRole

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least, _most, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce


class PlacementReason(Enum):
    """Why the prompt is computed where it is."""

    DISAGGREGATED = "disaggregated"
    SHORT_SUFFIX = "short_suffix"
    """The uncached suffix is so short that a hand-off is never worth it."""
    LOCAL_CHEAPER = "local_cheaper"
    """A hand-off would cost more than it saves, because of its queue or its link."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """No prefill worker is live, available and able to pair with the decode worker."""
    ADOPTED = "adopted"
    """Nowhere: the worker runs it already, for a router that is gone."""


class Affinity(Enum):
    """How the cached prefix influenced the placement."""

    PREFIX = "prefix"
    """No available worker held more of it."""
    COLD = "cold"
    """No available worker held any of it."""
    SPREAD = "spread"
    """Another worker held more, but waiting there costs more than computing here."""
    REPLICA = "replica"
    """Another worker held more; this one is to have a copy."""


class NoDecodeWorker(Exception):
    """No decode worker is live, available and untried; the message gives their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDemand:
    """What one choice needs of its workers."""

    num_tokens: int
    """Tokens of the prompt and of earlier attempts' output, all of which need KV."""
    matched: Ints
    """[num_slots]: leading tokens whose KV a worker holds, by the worker's slot."""
    excluded: frozenset[WorkerKey] = frozenset()
    """Workers on which the choice has failed or was refused."""
    pool_tokens_above: int = 0
    """Pool size, in tokens, of a worker that reported that the request can never fit there."""
    is_local: bool = False
    """Whether a decode worker should prefill it itself, whatever a hand-off costs: others wait for the prefill pool."""
    replicate_tokens: int = 0
    """Leading tokens of which another worker may have a copy: one that lacks them is not charged for computing them."""
    now_s: float = 0.0
    """Time on the clock by which penalties end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision, with everything that it was made from."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    """The prefill worker; None: the decode worker computes the prompt itself."""
    reason: PlacementReason
    cached_tokens: int
    """Prediction of the tokens that the computing worker need not compute."""
    uncached_tokens: int
    predicted_ms: float
    affinity: Affinity = Affinity.COLD
    work_tokens: int = 0
    """Uncached tokens plus what their context adds, in tokens without context; plain tokens if that is not reported."""
    compute_ms: float = 0.0
    """Time to compute them, without the queue."""
    held_by_decode: int = 0
    """Tokens whose KV the decode worker already has."""
    replicate_tokens: int = 0
    """Leading tokens of which another worker was allowed a copy."""
    decode_candidates: Sequence[CandidateCost] = ()
    """Every decode worker that could be chosen, the chosen one first, then cheapest first; built when accessed."""
    prefill_candidates: Sequence[CandidateCost] = ()
    """Every prefill worker that could be chosen, likewise."""

    @property
    def computing(self) -> WorkerSnapshot:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partner:
    """The best prefill worker for one kind of decode worker."""

    row: int
    cost_ms: float


def place(demand: PlacementDemand, view: ClusterView, model: CostModel, rng: Random) -> Placement:
    """Choose a decode worker and, unless it computes the prompt itself, a prefill worker.

    Raises NoDecodeWorker, or RequestTooLarge when the only obstacle is that no pool can ever hold the request.
    """
    closed = _closed_decoders(demand, view.decode)
    prefill = price_prefill(demand, view.prefill, model)
    partners = [_best_partner(prefill, able, model, rng) for able in view.partners]
    decode = _price_decode(demand, view, partners, model)
    if closed is not None:
        decode.total[closed] = np.inf
    row = _pick(decode.total, decode.held, decode.load, model, rng)
    partner = partners[view.decode.members.kinds[row]]
    costs, at = (decode, row) if partner is None or decode.local[row] else (prefill, partner.row)
    held = int(costs.held[at])
    computing = decode.local_terms if costs is decode else prefill.terms
    return Placement(
        decode=view.decode.snapshot(row, demand.now_s),
        prefill=None if costs is decode else view.prefill.snapshot(at, demand.now_s),
        reason=_reason(demand, decode, row, partner, model),
        cached_tokens=held,
        uncached_tokens=demand.num_tokens - held,
        predicted_ms=float(decode.total[row]),
        affinity=_affinity(demand, costs, at),
        work_tokens=round(float(costs.work[at])),
        compute_ms=float(computing["compute_ms"][at]),
        held_by_decode=int(decode.held[row]),
        replicate_tokens=demand.replicate_tokens,
        decode_candidates=CandidateCosts(decode, row),
        prefill_candidates=CandidateCosts(prefill, None if costs is decode else at),
    )


def place_prefill(
    demand: PlacementDemand, decode: WorkerSnapshot, view: ClusterView, model: CostModel, rng: Random
) -> tuple[WorkerSnapshot, int] | None:
    """Choose another prefill worker for a request that stays on `decode`; return it and its work. None: none can
    pair."""
    costs = price_prefill(demand, view.prefill, model)
    best = _best_partner(costs, view.prefill.members.able(decode.info), model, rng)
    if best is None:
        return None
    return view.prefill.snapshot(best.row, demand.now_s), round(float(costs.work[best.row]))


def price_prefill(demand: PlacementDemand, pool: PoolView, model: CostModel) -> PoolCosts:
    """Compute the cost of every prefill worker for this prompt; infinite for those that may not be chosen."""
    held = _held(demand, pool)
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
    closed = _closed(demand, pool)
    if pool.members.least_pool_tokens <= demand.num_tokens:
        small = pool.members.pool_tokens <= demand.num_tokens
        closed = small if closed is None else closed | small
    if len(total):
        # What an available worker need not compute; every other one would compute it again.
        least = _least(charged if closed is None else np.where(closed, _most(charged), charged))
        crowd = model.again_weight * _sum(pool.active) / len(total)
        terms["again_ms"] = (charged - least) * (token_ms * crowd)
        total += terms["again_ms"]
    _add_penalty(demand, pool, terms, total)
    if closed is not None:
        total[closed] = np.inf
    return PoolCosts(members=pool.members, held=held, work=work, total=total, terms=terms)


def _price_decode(
    demand: PlacementDemand, view: ClusterView, partners: list[_Partner | None], model: CostModel
) -> DecodeCosts:
    pool = view.decode
    held = _held(demand, pool)
    uncached = demand.num_tokens - held
    work = _work(demand.num_tokens, held, pool)
    token_ms, step = prefill_ms(pool, model), step_ms(pool, model)
    lacking = np.maximum(uncached - pool.free_tokens, 0.0)
    memory, itl = lacking * step * pool.relief, step * pool.active * (model.itl_share * model.itl_horizon_tokens)
    compute = work * token_ms
    queue, stall = pool.backlog * token_ms, compute * (np.maximum(pool.active, 1.0) * model.stall_share)
    transfer = uncached * link_ms(pool, model)
    remote = transfer + (_partner_ms(partners, pool) + model.handoff_ms)
    here, local_terms = queue + compute + stall, {"queue_ms": queue, "compute_ms": compute, "stall_ms": stall}
    if demand.replicate_tokens and not len(view.prefill.members):
        local_terms["copy_ms"] = _uncharged(demand, held, work, pool) * token_ms
        here += local_terms["copy_ms"]
    local = prefers_local_prefill(demand, uncached, here, remote, model)
    load = memory + itl
    terms = {"memory_ms": memory, "itl_ms": itl}
    total = load + np.where(local, here, remote)
    _add_penalty(demand, pool, terms, total)
    return DecodeCosts(
        members=pool.members,
        held=held,
        work=work,
        total=total,
        terms=terms,
        local=local,
        local_terms=local_terms,
        remote_terms={"transfer_ms": transfer, "handoff_ms": remote - transfer},
        load=load,
        num_tokens=demand.num_tokens,
        floor_tokens=model.local_prefill_tokens,
        most_tokens=model.max_local_prefill_tokens,
    )


def prefers_local_prefill(
    demand: PlacementDemand, uncached: Floats, local_ms: Floats, remote_ms: Floats, model: CostModel
) -> Bools:
    """Whether each decode worker computes the prompt itself (local prefill), or a prefill worker does (disaggregated).

    The cheaper of both, within the bounds on uncached tokens; local if the demand or the lack of a partner requires it.
    The demand does where admission let it in as local, the prefill pool being full (`ClusterCapacity.reads_itself`).
    """
    local: Bools = local_ms <= remote_ms
    if model.max_local_prefill_tokens is not None:
        local &= (uncached <= model.max_local_prefill_tokens) | (remote_ms == np.inf)
    local |= demand.is_local | (uncached <= model.local_prefill_tokens)
    return local


def _partner_ms(partners: list[_Partner | None], pool: PoolView) -> float | Floats:
    costs = [np.inf if partner is None else partner.cost_ms for partner in partners]
    return costs[0] if len(costs) == 1 else np.array(costs)[pool.members.kinds]


def _add_penalty(demand: PlacementDemand, pool: PoolView, terms: dict[str, Floats], total: Floats) -> None:
    if pool.penalised_until_s is not None:
        terms["penalty_ms"] = np.maximum(pool.penalised_until_s - demand.now_s, 0.0) * 1e3
        total += terms["penalty_ms"]


def _held(demand: PlacementDemand, pool: PoolView) -> Floats:
    """Return tokens that need not be computed: whole physical blocks, never the last token, whose logits are needed."""
    members = pool.members
    # Float from here on: operations that mix it with integers would convert it each time.
    held: Floats = (
        np.minimum(demand.matched[members.slots], demand.num_tokens - 1) // members.block_sizes * members.tokens
    )
    return held


def _work(num_tokens: int, held: Floats, pool: PoolView) -> Floats:
    """Return tokens to compute; where reported, each is weighted by the context that it attends to."""
    uncached = num_tokens - held
    if pool.attention is None:
        return uncached
    grown: Floats = uncached + pool.attention * uncached * (num_tokens + held)
    return grown


def _uncharged(demand: PlacementDemand, held: Floats, work: Floats, pool: PoolView) -> Floats:
    """Return the discount, below zero, for workers that lack the prefix that is to be copied."""
    copied = np.maximum(held, min(demand.replicate_tokens, demand.num_tokens - 1))
    return _work(demand.num_tokens, copied, pool) - work


def _closed(demand: PlacementDemand, pool: PoolView) -> Bools | None:
    """Return the rows that may not be chosen; None when all may."""
    closed = None if pool.open is None else ~pool.open
    if demand.excluded:
        rows = [row for key in demand.excluded if (row := pool.members.rows.get(key)) is not None]
        if rows:
            closed = np.zeros(len(pool.members), dtype=np.bool_) if closed is None else closed
            closed[rows] = True
    return closed


def _closed_decoders(demand: PlacementDemand, pool: PoolView) -> Bools | None:
    num_live, needed = len(pool.members), max(demand.num_tokens, demand.pool_tokens_above)
    closed = _closed(demand, pool)
    if pool.members.least_pool_tokens <= needed:
        small = pool.members.pool_tokens <= needed
        if num_live and small.all():
            raise RequestTooLarge(
                f"the request needs KV for more than {demand.num_tokens} tokens; "
                f"the largest pool holds {pool.members.pool_tokens.max()}"
            )
        closed = small if closed is None else closed | small
    if not num_live or (closed is not None and closed.all()):
        draining = 0 if pool.open is None else int((~pool.open).sum())
        raise NoDecodeWorker(f"none of {num_live} decode workers can accept the request ({draining} draining)")
    return closed


def _best_partner(costs: PoolCosts, able: Bools | None, model: CostModel, rng: Random) -> _Partner | None:
    if not len(costs.total):
        return None
    total = costs.total if able is None else np.where(able, costs.total, np.inf)
    row = _pick(total, costs.held, costs.terms["queue_ms"], model, rng)
    cost_ms = float(total[row])
    return None if cost_ms == np.inf else _Partner(row=row, cost_ms=cost_ms)


def _pick(total: Floats, held: Floats, load: Floats, model: CostModel, rng: Random) -> int:
    """Pick, of the workers tied for the lowest cost, the one that holds most; then the least loaded; then at random."""
    best = _least(total)
    rows = (total <= best * (1.0 + model.tie_share) + model.tie_ms).nonzero()[0]
    if len(rows) > 1:
        most = held[rows]
        rows = rows[most == _most(most)]
    if len(rows) > 1:
        waiting = load[rows]
        rows = rows[waiting <= _least(waiting) + model.tie_ms]
    return int(rows[0] if len(rows) == 1 else rows[rng.randrange(len(rows))])


def _reason(
    demand: PlacementDemand, costs: DecodeCosts, row: int, partner: _Partner | None, model: CostModel
) -> PlacementReason:
    if demand.num_tokens - int(costs.held[row]) <= model.local_prefill_tokens:
        return PlacementReason.SHORT_SUFFIX
    if partner is None:
        return PlacementReason.NO_PREFILL_WORKER
    return PlacementReason.LOCAL_CHEAPER if costs.local[row] else PlacementReason.DISAGGREGATED


def _affinity(demand: PlacementDemand, costs: PoolCosts, row: int) -> Affinity:
    most = _most(costs.held)
    if costs.held[row] >= most:
        return Affinity.PREFIX if most else Affinity.COLD
    most = _most(costs.held[costs.total < np.inf])
    if costs.held[row] >= most:
        return Affinity.PREFIX if most else Affinity.COLD
    return Affinity.REPLICA if demand.replicate_tokens > costs.held[row] else Affinity.SPREAD


_TOKENS_PER_S = 1000.0
"""Assumed rate of a worker that has measured nothing yet."""


def choose_scoring_worker(
    workers: Iterable[WorkerSnapshot],
    num_tokens: int,
    *,
    excluded: Collection[WorkerKey],
    avoided: Collection[WorkerKey],
    prefer: WorkerKey | None = None,
) -> WorkerSnapshot | None:
    """Choose the worker predicted to have computed it first; `avoided`: only if there is no other. None: none can.

    `prefer`: the worker that has most of it cached.
    """
    fit = [
        worker
        for worker in workers
        if not worker.draining
        and worker.info.key not in excluded
        and num_tokens <= min(worker.info.max_model_len, worker.info.pool_tokens)
    ]

    def cost(worker: WorkerSnapshot) -> tuple[bool, bool, bool, float, str]:
        rate = worker.load.prefill_tokens_per_s or _TOKENS_PER_S
        wait_ms = 1e3 * (worker.backlog_tokens + num_tokens) / rate
        return (
            worker.info.key in avoided,
            worker.info.key != prefer,
            worker.info.role is not WorkerRole.PREFILL,
            wait_ms + worker.penalty_ms,
            worker.info.key.worker_id,
        )

    return min(fit, key=cost, default=None)
