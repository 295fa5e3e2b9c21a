"""The cost of every pair in plain Python, worker by worker, as the columns must have it."""

from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct

from router.placement.costs import CostModel
from router.types.worker_view import WorkerKey, WorkerSnapshot
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tandem.values.roles import WorkerRole


class PlacementRequest(Struct, frozen=True):
    num_tokens: int
    matched: Mapping[str, int]
    excluded: frozenset[WorkerKey] = frozenset()
    replicate_tokens: int = 0
    adapter_ms: Mapping[str, float] | None = None
    """Time until each worker has loaded the request's adapter, by name; None: it has none."""

    def load_ms(self, one: WorkerSnapshot) -> float:
        return 0.0 if self.adapter_ms is None else self.adapter_ms[one.info.key.worker_id]


def mean(values: Sequence[float], prior: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else prior


def token_ms(one: WorkerSnapshot, pool: Sequence[WorkerSnapshot], model: CostModel) -> float:
    def of(w: WorkerSnapshot) -> float:
        return 1e3 / w.load.prefill_tokens_per_s if w.load.prefill_tokens_per_s else 0.0

    return of(one) or mean([of(w) for w in pool], 1e3 / model.prior_prefill_tokens_per_s)


def held(one: WorkerSnapshot, request: PlacementRequest) -> int:
    size = one.info.layout.block_size
    return min(request.matched.get(one.info.key.worker_id, 0), request.num_tokens - 1) // size * size


def work(one: WorkerSnapshot, request: PlacementRequest, tokens_held: int) -> float:
    """Every token counts one, and one more for each `context_tokens` before it."""
    uncached, context = request.num_tokens - tokens_held, one.load.context_tokens
    return uncached + (uncached * (tokens_held + request.num_tokens) / 2 / context if context else 0.0)


def usable(one: WorkerSnapshot, request: PlacementRequest) -> bool:
    room = one.info.pool_tokens > request.num_tokens
    knows = request.adapter_ms is None or one.info.protocol_version >= ADAPTERS_SINCE
    return room and knows and not one.draining and one.info.key not in request.excluded


def charged_of(one: WorkerSnapshot, request: PlacementRequest) -> int:
    """Leading tokens that it is not charged for."""
    return max(
        held(one, request), min(request.replicate_tokens, request.num_tokens - 1) if request.replicate_tokens else 0
    )


def prefill_cost(
    one: WorkerSnapshot, pool: Sequence[WorkerSnapshot], request: PlacementRequest, model: CostModel
) -> float:
    charged = charged_of(one, request)
    per_token = token_ms(one, pool, model)
    again = work(one, request, charged) - min(
        work(w, request, charged_of(w, request)) for w in pool if usable(w, request)
    )
    crowd = model.recompute_weight * sum(w.num_active for w in pool) / len(pool)
    waits_ms = one.penalty_ms + request.load_ms(one)
    return (one.backlog_tokens + work(one, request, charged) + again * crowd) * per_token + waits_ms


def pair_cost(
    decode: WorkerSnapshot,
    prefill: WorkerSnapshot | None,
    workers: Sequence[WorkerSnapshot],
    request: PlacementRequest,
    model: CostModel,
) -> float:
    """Of one pair; `prefill` None: the decode worker computes the prompt. Infinite where it may not be."""
    decoders = [w for w in workers if w.info.role is WorkerRole.DECODE]
    prefills = [w for w in workers if w.info.role is WorkerRole.PREFILL]
    if not usable(decode, request):
        return inf
    own = held(decode, request)
    uncached = request.num_tokens - own
    step = 1e3 * decode.load.decode_step_s or mean(
        [1e3 * w.load.decode_step_s for w in decoders], 1e3 * model.prior_decode_step_s
    )
    lacking = max(0, uncached - decode.load.num_free_blocks * decode.info.layout.block_size)
    cost = decode.penalty_ms + request.load_ms(decode) + lacking * step / max(1, decode.load.num_running)
    cost += step * model.itl_share * model.itl_horizon_tokens * decode.num_active
    if prefill is None:
        per_token = token_ms(decode, decoders, model)
        compute = work(decode, request, own) * per_token
        copy = 0.0
        if request.replicate_tokens and not prefills:
            charged = max(own, min(request.replicate_tokens, request.num_tokens - 1))
            copy = (work(decode, request, charged) - work(decode, request, own)) * per_token
        stall = compute * model.stall_share * max(1, decode.num_active)
        return cost + decode.backlog_tokens * per_token + compute + stall + copy
    if not usable(prefill, request) or not prefill.info.handoff_address or decode.info.cannot_pair(prefill.info):
        return inf
    if uncached <= model.local_prefill_tokens:
        return inf

    def link(w: WorkerSnapshot) -> float:
        return 1e3 * w.info.kv_bytes_per_token / w.load.kv_bytes_per_s if w.load.kv_bytes_per_s else 0.0

    prior = 1e3 * decode.info.kv_bytes_per_token / model.prior_kv_bytes_per_s
    transfer = uncached * (link(decode) or mean([link(w) for w in decoders], prior))
    return cost + transfer + model.handoff_ms + prefill_cost(prefill, prefills, request, model)
