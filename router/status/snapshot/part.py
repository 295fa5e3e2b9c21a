"""One router process's part of the status of the cluster (`router.status.snapshot.merge`).

It has counts, rates, names of workers and of blocks: never a prompt, a token or an answer. Every list is bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.admission.fair_admission import FairAdmission
from router.api.request.client_request import ModelInfo
from router.metrics.router_metrics import RouterMetrics
from router.placement.decision_log import DecisionLog, PlacementDecision
from router.placement.placer import Placer
from router.status.snapshot.history import CounterTotals, History
from router.status.snapshot.merge import FORMAT, MOST_DECISIONS, MOST_HANDOFFS, MOST_PREFIXES, TENANT
from router.types.worker_view import TransferSide, WorkerSnapshot
from router.workers.health import WorkerHealth
from tandem.circuit_breaker import BreakerState

_MOST_LOOKED_AT = 2048
_MOST_WORKERS = 512
_NAME_BYTES = 8
_STUCK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    """The parts of a router that its status is read from."""

    model: ModelInfo
    placer: Placer
    health: WorkerHealth
    admission: FairAdmission
    metrics: RouterMetrics
    decisions: DecisionLog
    not_ready_reason: Callable[[], str | None]
    clock: Callable[[], float]


def totals(sources: StatusSources) -> CounterTotals:
    """Return all counts since the process began, for the history."""
    metrics = sources.metrics
    moved = [side for worker in sources.placer.registry.snapshots() if (side := _side(worker, "received"))]
    return CounterTotals(
        numbers={
            "prompt_tokens": metrics.prompt_tokens.value,
            "generation_tokens": metrics.generation_tokens.value,
            "queried_tokens": metrics.prefix_queries.value,
            "cached_tokens": metrics.prefix_hits.value,
            "finished": metrics.num_succeeded,
            "failed": metrics.num_failed,
            "refused": float(sum(sources.admission.counts.rejections.values())),
            "moved_bytes": float(sum(ends.num_bytes for side in moved for ends in side.ended)),
            "moves": float(sum(ends.count for side in moved for ends in side.ended)),
        },
        spreads={"ttft": metrics.ttft.counts, "itl": metrics.itl.counts},
    )


def part_of(sources: StatusSources, history: History) -> dict[str, Any]:
    """Return the whole part, as JSON that another process can parse."""
    placer, admission, metrics = sources.placer, sources.admission, sources.metrics
    model = sources.model
    return {
        "format": FORMAT,
        "model": {
            "name": model.name,
            "max_model_len": model.max_model_len,
            "has_chat_template": model.has_chat_template,
        },
        "not_ready": sources.not_ready_reason(),
        "requests": {"running": int(metrics.running.value), "waiting": int(metrics.waiting.value)},
        "queue": {
            "requests": admission.num_waiting,
            "tokens": admission.num_waiting_tokens,
            "oldest_s": round(admission.oldest_s(), 3),
        },
        "workers": _workers(sources),
        "handoffs": {"in_flight": len(placer.handoffs), "shown": _handoffs(sources)},
        "prefixes": _prefixes(placer),
        "decisions": _decisions(sources),
        "now_s": sources.clock(),
        "step_s": history.step_s,
        "steps": [step.as_json() for step in history.steps()],
    }


def _workers(sources: StatusSources) -> list[dict[str, Any]]:
    breakers = sources.health.breakers.states(sources.clock())
    known, shown = sources.placer.registry.prefix_map, []
    for worker in sources.placer.registry.snapshots()[:_MOST_WORKERS]:
        info, load = worker.info, worker.load
        shown.append(
            {
                "id": info.key.worker_id,
                "role": info.role.value,
                "rack": info.rack,
                "state": _state(worker, breakers.get(info.key)),
                "report": load.report_number,
                "blocks": info.num_blocks,
                "used_blocks": info.num_blocks - load.num_free_blocks,
                "quarantined_blocks": load.num_quarantined_blocks,
                "cached_blocks": known.num_blocks(info.key.worker_id),
                "block_size": info.layout.block_size,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "backlog_tokens": load.backlog_tokens,
                "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
                "decode_step_s": round(load.decode_step_s, 6),
                "kv_bytes_per_s": round(load.kv_bytes_per_s),
                "step_age_s": round(load.step_age_s, 3),
                "sending": _live(worker, "sent"),
                "receiving": _live(worker, "received"),
            }
        )
    return shown


def _state(worker: WorkerSnapshot, breaker: BreakerState | None) -> str:
    if worker.load.step_age_s >= _STUCK_S:
        return "stuck"
    if worker.draining:
        return "draining"
    if breaker is BreakerState.OPEN:
        return "avoided"
    return "probing" if breaker is BreakerState.HALF_OPEN else "live"


def _side(worker: WorkerSnapshot, direction: str) -> TransferSide | None:
    if (report := worker.load.transfers) is None:
        return None
    return next((side for side in report.sides if side.direction == direction), None)


def _live(worker: WorkerSnapshot, direction: str) -> int:
    side = _side(worker, direction)
    return 0 if side is None else side.live


def _handoffs(sources: StatusSources) -> list[dict[str, Any]]:
    now_s = sources.clock()
    return [
        {
            "source": handoff.source,
            "target": handoff.target,
            "tokens": handoff.num_tokens,
            "age_s": round(now_s - handoff.since_s, 3),
        }
        for handoff in sources.placer.handoffs.oldest(MOST_HANDOFFS)
    ]


def _prefixes(placer: Placer) -> list[dict[str, Any]]:
    return [
        {
            "name": prefix.name[:_NAME_BYTES].hex(),
            "tokens": prefix.num_tokens,
            "asked": prefix.num_requests,
            "busy_share": round(prefix.busy_share, 4),
            "copies_wanted": prefix.num_copies,
            "holders": sorted(placer.registry.prefix_map.holders(prefix.name)),
        }
        for prefix in placer.hottest(MOST_PREFIXES)
    ]


def _decisions(sources: StatusSources) -> list[dict[str, Any]]:
    """Return the last decisions of every tenant, the newest first."""
    now_s, found, counts = sources.clock(), [], dict[str, int]()
    for decision in sources.decisions.newest(_MOST_LOOKED_AT):
        count = counts[decision.tenant] = counts.get(decision.tenant, 0) + 1
        if count <= MOST_DECISIONS:
            found.append(_decision(decision, now_s))
    return found


def _decision(decision: PlacementDecision, now_s: float) -> dict[str, Any]:
    placement, prefill = decision.placement, decision.placement.prefill
    return {
        TENANT: decision.tenant,
        "request_id": decision.request_id,
        "age_s": round(now_s - decision.at_s, 3),
        "tokens": decision.num_tokens,
        "reason": placement.reason.value,
        "affinity": placement.affinity.value,
        "decode": placement.decode.info.key.worker_id,
        "prefill": None if prefill is None else prefill.info.key.worker_id,
        "holder": decision.holder,
        "rerouted": list(decision.rerouted),
        "predicted_cached": placement.cached_tokens,
        "actual_cached": decision.actual_cached_tokens,
        "predicted_ms": round(placement.predicted_ms, 1),
        "candidates": len(placement.decode_candidates) + len(placement.prefill_candidates),
        "decided_us": round(decision.seconds * 1e6),
    }
