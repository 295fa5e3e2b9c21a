"""Who computes a prompt and who decodes it: filters, then one cost in milliseconds, then a pick.

The cost of a candidate is the predicted time to the first token (queue ahead, uncached tokens at the measured
prefill rate, KV bytes at the measured link rate, wait for memory) plus its predicted effect on inter-token latency
plus the time for which it is better left alone. The prefill and the decode worker are chosen jointly; the cost
separates given that the two can pair, so the choice is linear in the number of workers, not quadratic.

A worker that holds a prefix wins by the tokens it need not compute, until its queue costs more than computing them
elsewhere: that is what spreads a hot prefix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from router.worker_view import WorkerKey, WorkerSnapshot
from tandem.errors import RequestTooLarge
from tandem.ids import WorkerId
from tandem.kv_layout import KVLayout
from tandem.roles import WorkerRole


class PlacementReason(Enum):
    """Why the prompt is computed where it is."""

    DISAGGREGATED = "disaggregated"
    SHORT_SUFFIX = "short_suffix"
    """The uncached suffix is within the threshold: a hand-off would cost more than it saves."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """None is live, willing and able to pair with the decode worker."""
    ADOPTED = "adopted"
    """Nowhere: the worker runs it already, for a router that is gone."""


class NoDecodeWorker(Exception):
    """No decode worker is live, willing and not yet tried; the message says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one choice needs."""

    num_tokens: int
    """Prompt, and output of earlier attempts: all of it must have KV."""
    matched_tokens: Mapping[WorkerId, int]
    """Leading tokens whose KV a worker holds; absent means none."""
    excluded: frozenset[WorkerKey] = frozenset()
    """Workers that this choice has tried in vain."""
    pool_tokens_above: int = 0
    """A worker with a pool of so many tokens said that the request can never fit there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Bounds and priors; a prior stands for a rate until some worker of the pool has measured it."""

    local_prefill_tokens: int = 64
    """Uncached tokens up to which the decode worker computes the prompt itself."""
    prior_prefill_tokens_per_s: float = 5_000.0
    prior_decode_step_s: float = 0.02
    prior_kv_bytes_per_s: float = 1e9
    itl_share: float = 0.02
    """Share by which one more sequence lengthens a decode step."""
    itl_horizon_tokens: int = 64
    """Tokens over which the effect on inter-token latency is counted."""
    tie_ms: float = 0.5
    tie_share: float = 0.02
    """Costs within `tie_ms` plus this share are equal: predictions are no better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCost:
    """One worker's predicted cost, in milliseconds."""

    key: WorkerKey
    role: WorkerRole
    matched_tokens: int
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    transfer_ms: float = 0.0
    memory_ms: float = 0.0
    itl_ms: float = 0.0
    penalty_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """The sum that is minimised."""
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.memory_ms + self.itl_ms + self.penalty_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision, with all that it was made from."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    """None: the decode worker computes the prompt itself."""
    reason: PlacementReason
    cached_tokens: int
    """Predicted: tokens that whoever computes the prompt need not compute."""
    uncached_tokens: int
    predicted_ms: float
    candidates: tuple[CandidateCost, ...]
    """Every worker that was considered, of both pools."""

    @property
    def computing(self) -> WorkerSnapshot:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """What workers are predicted with that have not measured their own."""

    prefill_tokens_per_s: float
    decode_step_s: float
    kv_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A decode worker with the best way to get the prompt computed for it."""

    decode: WorkerSnapshot
    cost: CandidateCost
    prefill: WorkerSnapshot | None
    prefill_cost: CandidateCost | None
    reason: PlacementReason

    @property
    def total_ms(self) -> float:
        return self.cost.total_ms + (self.prefill_cost.total_ms if self.prefill_cost else 0.0)

    @property
    def matched_tokens(self) -> int:
        return (self.prefill_cost or self.cost).matched_tokens


def place(demand: Demand, workers: Sequence[WorkerSnapshot], model: CostModel, rng: Random) -> Placement:
    """Choose a decode worker and, unless it computes the prompt itself, a prefill worker.

    Raises NoDecodeWorker, or RequestTooLarge when the only obstacle is that no pool can ever hold the request.
    """
    decoders = _usable_decoders(demand, workers)
    prefillers = _price_prefillers(demand, workers, model)
    rates = _pool_rates([w for w in workers if w.info.role is WorkerRole.DECODE], model)
    kinds = {_pairing(d): d for d in decoders}
    partners = {kind: _best_partner(d, prefillers, model, rng) for kind, d in kinds.items()}
    options = [_option(demand, d, partners[_pairing(d)], rates, model) for d in decoders]
    best = _pick(options, model, rng)
    return Placement(
        decode=best.decode,
        prefill=best.prefill,
        reason=best.reason,
        cached_tokens=best.matched_tokens,
        uncached_tokens=demand.num_tokens - best.matched_tokens,
        predicted_ms=best.total_ms,
        candidates=(*(o.cost for o in options), *(cost for _, cost in prefillers)),
    )


def place_prefill(
    demand: Demand, decode: WorkerSnapshot, workers: Sequence[WorkerSnapshot], model: CostModel, rng: Random
) -> WorkerSnapshot | None:
    """Another prefill worker for a request that stays on `decode`, or None when there is none to pair with."""
    best = _best_partner(decode, _price_prefillers(demand, workers, model), model, rng)
    return None if best is None else best[0]


_Priced = tuple[WorkerSnapshot, CandidateCost]


def _usable_decoders(demand: Demand, workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    live = [w for w in workers if w.info.role is WorkerRole.DECODE]
    large = [w for w in live if w.info.pool_tokens > max(demand.num_tokens, demand.pool_tokens_above)]
    if live and not large:
        largest = max(w.info.pool_tokens for w in live)
        raise RequestTooLarge(
            f"the request needs KV of {demand.num_tokens} tokens and more; the largest pool holds {largest}"
        )
    usable = [w for w in large if not w.draining and w.info.key not in demand.excluded]
    if not usable:
        draining = sum(w.draining for w in live)
        raise NoDecodeWorker(f"none of {len(live)} decode workers can take the request ({draining} draining)")
    return usable


def _price_prefillers(demand: Demand, workers: Sequence[WorkerSnapshot], model: CostModel) -> list[_Priced]:
    live = [w for w in workers if w.info.role is WorkerRole.PREFILL]
    rates = _pool_rates(live, model)
    return [
        (w, _compute_cost(demand, w, rates))
        for w in live
        if not w.draining
        and w.info.handoff_address
        and w.info.key not in demand.excluded
        and w.info.pool_tokens > demand.num_tokens
    ]


def _pairing(worker: WorkerSnapshot) -> tuple[KVLayout, frozenset[str]]:
    """Workers that agree in this can pair with the same others."""
    return worker.info.layout, worker.info.transports


def _option(
    demand: Demand, decode: WorkerSnapshot, partner: _Priced | None, rates: _Rates, model: CostModel
) -> _Option:
    if demand.num_tokens - _matched(demand, decode) <= model.local_prefill_tokens:
        partner, reason = None, PlacementReason.SHORT_SUFFIX
    elif partner is None:
        reason = PlacementReason.NO_PREFILL_WORKER
    else:
        reason = PlacementReason.DISAGGREGATED
    return _Option(
        decode=decode,
        cost=_decode_cost(demand, decode, rates, model, computes=partner is None),
        prefill=partner[0] if partner else None,
        prefill_cost=partner[1] if partner else None,
        reason=reason,
    )


def _best_partner(
    decode: WorkerSnapshot, prefillers: Iterable[_Priced], model: CostModel, rng: Random
) -> _Priced | None:
    able = [(w, cost) for w, cost in prefillers if decode.info.cannot_pair(w.info) is None]
    if not able:
        return None
    limit = _tie_limit(min(cost.total_ms for _, cost in able), model)
    ties = [priced for priced in able if priced[1].total_ms <= limit]
    longest = max(cost.matched_tokens for _, cost in ties)
    return rng.choice([priced for priced in ties if priced[1].matched_tokens == longest])


def _pick(options: Sequence[_Option], model: CostModel, rng: Random) -> _Option:
    limit = _tie_limit(min(o.total_ms for o in options), model)
    ties = [o for o in options if o.total_ms <= limit]
    longest = max(o.cost.matched_tokens for o in ties)
    return rng.choice([o for o in ties if o.cost.matched_tokens == longest])


def _tie_limit(best_ms: float, model: CostModel) -> float:
    return best_ms * (1 + model.tie_share) + model.tie_ms


def _compute_cost(demand: Demand, worker: WorkerSnapshot, rates: _Rates) -> CandidateCost:
    per_token_ms = 1e3 / (worker.load.prefill_tokens_per_s or rates.prefill_tokens_per_s)
    matched = _matched(demand, worker)
    return CandidateCost(
        key=worker.info.key,
        role=worker.info.role,
        matched_tokens=matched,
        queue_ms=worker.backlog_tokens * per_token_ms,
        compute_ms=(demand.num_tokens - matched) * per_token_ms,
        penalty_ms=worker.penalty_ms,
    )


def _decode_cost(
    demand: Demand, worker: WorkerSnapshot, rates: _Rates, model: CostModel, *, computes: bool
) -> CandidateCost:
    compute = _compute_cost(demand, worker, rates)
    uncached = demand.num_tokens - compute.matched_tokens
    step_ms = 1e3 * (worker.load.decode_step_s or rates.decode_step_s)
    lacking = max(0, uncached - worker.load.num_free_blocks * worker.info.layout.block_size)
    link = worker.load.kv_bytes_per_s or rates.kv_bytes_per_s
    return CandidateCost(
        key=worker.info.key,
        role=worker.info.role,
        matched_tokens=compute.matched_tokens,
        queue_ms=compute.queue_ms if computes else 0.0,
        compute_ms=compute.compute_ms if computes else 0.0,
        transfer_ms=0.0 if computes else 1e3 * uncached * worker.info.kv_bytes_per_token / link,
        # Memory comes back as sequences end; each step brings every running one a token nearer to its end.
        memory_ms=lacking * step_ms / max(1, worker.load.num_running),
        itl_ms=step_ms * model.itl_share * model.itl_horizon_tokens * worker.num_active,
        penalty_ms=worker.penalty_ms,
    )


def _matched(demand: Demand, worker: WorkerSnapshot) -> int:
    """Tokens that need not be computed: whole physical blocks, and never the last token, whose logits are needed."""
    block_size = worker.info.layout.block_size
    held = min(demand.matched_tokens.get(worker.info.key.worker_id, 0), demand.num_tokens - 1)
    return held // block_size * block_size


def _pool_rates(workers: Iterable[WorkerSnapshot], model: CostModel) -> _Rates:
    loads = [w.load for w in workers]
    return _Rates(
        prefill_tokens_per_s=_mean([x.prefill_tokens_per_s for x in loads], model.prior_prefill_tokens_per_s),
        decode_step_s=_mean([x.decode_step_s for x in loads], model.prior_decode_step_s),
        kv_bytes_per_s=_mean([x.kv_bytes_per_s for x in loads], model.prior_kv_bytes_per_s),
    )


def _mean(values: Iterable[float], prior: float) -> float:
    measured = [v for v in values if v > 0.0]
    return sum(measured) / len(measured) if measured else prior
