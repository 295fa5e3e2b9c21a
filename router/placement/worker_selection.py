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

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from random import Random

import numpy as np
from msgspec import Struct

from router.placement.costs import CostModel, link_ms
from router.placement.demand import PlacementDemand
from router.placement.partners import LinkedPartners, Partner, best_partner, partners_of, pick
from router.placement.pool_costs import CandidateCosts, PoolCosts
from router.placement.pricing import held_tokens, price_decode, price_prefill
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.columns import ClusterView, PoolView
from tandem.errors import RequestTooLarge
from tandem.values.roles import WorkerRole

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_most = np.maximum.reduce


class PlacementReason(StrEnum):
    """Reason why the prompt is computed where it is."""

    DISAGGREGATED = "disaggregated"
    SHORT_SUFFIX = "short_suffix"
    """The uncached suffix is so short that a hand-off is never worth it."""
    LOCAL_CHEAPER = "local_cheaper"
    """A hand-off would cost more than it saves, because of its queue or its link."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """No prefill worker is live, available and able to pair with the decode worker."""
    ADOPTED = "adopted"
    """Nowhere: the worker runs it already, for a router that is gone."""


class Affinity(StrEnum):
    """Influence of the cached prefix on the placement."""

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


class Placement(Struct, frozen=True, kw_only=True):
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
    decode_candidates: CandidateCosts | tuple[()] = ()
    """Every decode worker that could be chosen, the chosen one first, then cheapest first; built when accessed."""
    prefill_candidates: CandidateCosts | tuple[()] = ()
    """Every prefill worker that could be chosen, likewise."""

    @property
    def computing(self) -> WorkerSnapshot:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


def place(demand: PlacementDemand, view: ClusterView, model: CostModel, rng: Random) -> Placement:
    """Choose a decode worker and, unless it computes the prompt itself, a prefill worker.

    Raises NoDecodeWorker, or RequestTooLarge when the only obstacle is that no pool can ever hold the request.
    """
    num_decode, needed = len(view.decode.members.infos), max(demand.num_tokens, demand.pool_tokens_above)
    closed = demand.closed(view.decode, needed)
    if not num_decode or (closed is not None and closed.all()):
        raise _no_decode_worker(demand, view.decode, needed)
    prefill = price_prefill(demand, view.prefill, model)
    partners = partners_of(prefill, view, demand.links, model, rng) if view.prefill.members.infos else None
    decode = price_decode(demand, view.decode, closed, partners, model)
    row, partner = pick(decode.total, decode.held, decode.load, model, rng), None
    if partners is not None and decode.transfer_ms is not None:
        transfer_ms = float(decode.transfer_ms[row])
        partner = partners.find(row, demand.num_tokens - float(decode.held[row]), transfer_ms)
    is_local = decode.local is None or bool(decode.local[row])
    costs, at = (decode, row) if partner is None or is_local else (prefill, partner.row)
    held = int(costs.held[at])
    return Placement(
        decode=view.decode.snapshot(row, demand.now_s),
        prefill=None if costs is decode else view.prefill.snapshot(at, demand.now_s),
        reason=_reason(demand, int(decode.held[row]), partner, model, is_local=is_local),
        cached_tokens=held,
        uncached_tokens=demand.num_tokens - held,
        predicted_ms=float(decode.total[row]),
        affinity=_affinity(demand, costs, at),
        work_tokens=round(float(costs.work[at])),
        compute_ms=float(costs.compute_ms[at]),
        held_by_decode=int(decode.held[row]),
        replicate_tokens=demand.replicate_tokens,
        decode_candidates=CandidateCosts(decode.total, decode.explain, row),
        prefill_candidates=()
        if partners is None
        else CandidateCosts(prefill.total, prefill.explain, None if costs is decode else at),
    )


def place_prefill(
    demand: PlacementDemand, decode: WorkerSnapshot, view: ClusterView, model: CostModel, rng: Random
) -> tuple[WorkerSnapshot, int] | None:
    """Choose another prefill worker for a request that stays on `decode`; return it and its work. None: none can
    pair."""
    costs = price_prefill(demand, view.prefill, model)
    row, links = view.decode.members.rows.get(decode.info.key), demand.links
    if links is None or row is None or not len(costs.total):
        best = best_partner(costs, view.prefill.members.compatible_with(decode.info), model, rng)
    else:
        uncached = float(demand.num_tokens - held_tokens(demand, view.decode)[row])
        transfer_ms = uncached * float(link_ms(view.decode, model)[row])
        best = LinkedPartners(costs, view, links, model, rng).find(row, uncached, transfer_ms)
    if best is None:
        return None
    return view.prefill.snapshot(best.row, demand.now_s), round(float(costs.work[best.row]))


def _no_decode_worker(demand: PlacementDemand, pool: PoolView, needed: int) -> NoDecodeWorker | RequestTooLarge:
    """Return why none can be chosen."""
    num_live = len(pool.members.infos)
    if num_live and (pool.members.pool_tokens <= needed).all():
        return RequestTooLarge(
            f"the request needs KV for more than {demand.num_tokens} tokens; "
            f"the largest pool holds {pool.members.pool_tokens.max()}"
        )
    draining = 0 if pool.open is None else int((~pool.open).sum())
    return NoDecodeWorker(f"none of {num_live} decode workers can accept the request ({draining} draining)")


def _reason(
    demand: PlacementDemand, held: int, partner: Partner | None, model: CostModel, *, is_local: bool
) -> PlacementReason:
    if demand.num_tokens - held <= model.local_prefill_tokens:
        return PlacementReason.SHORT_SUFFIX
    if partner is None:
        return PlacementReason.NO_PREFILL_WORKER
    return PlacementReason.LOCAL_CHEAPER if is_local else PlacementReason.DISAGGREGATED


def _affinity(demand: PlacementDemand, costs: PoolCosts, row: int) -> Affinity:
    held, own = costs.held, costs.held[row]
    most = _most(held) if isinstance(held, np.ndarray) else max(held)
    if own < most:
        # Workers that may not be chosen do not count.
        allowed = np.asarray(costs.total) < np.inf
        most = _most(np.asarray(held)[allowed])
    if own >= most:
        return Affinity.PREFIX if most else Affinity.COLD
    return Affinity.REPLICA if demand.replicate_tokens > own else Affinity.SPREAD


_TOKENS_PER_S = 1000.0
"""Assumed rate of a worker that has measured nothing yet."""
_NO_WAITS: Mapping[WorkerKey, float] = {}


def choose_scoring_worker(
    workers: Iterable[WorkerSnapshot],
    num_tokens: int,
    *,
    excluded: Collection[WorkerKey],
    avoided: Collection[WorkerKey],
    prefer: WorkerKey | None = None,
    adapter_ms: Mapping[WorkerKey, float] = _NO_WAITS,
) -> WorkerSnapshot | None:
    """Choose the worker predicted to have computed it first; `avoided`: only if there is no other. None: none can.

    `prefer`: the worker that has most of it cached. `adapter_ms`: time until workers have loaded the request's adapter.
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
            wait_ms + worker.penalty_ms + adapter_ms.get(worker.info.key, 0.0),
            worker.info.key.worker_id,
        )

    return min(fit, key=cost, default=None)
