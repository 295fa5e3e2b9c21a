"""The cost columns against plain Python on random clusters, and properties of every choice."""

import dataclasses
from collections import Counter
from contextlib import suppress
from math import inf, isfinite
from random import Random

import pytest
from msgspec.structs import replace

from router.placement import pricing
from router.placement.costs import CostModel, local_threshold
from router.placement.worker_selection import Affinity, NoDecodeWorker, Placement, PlacementReason, place
from router.types.worker_view import WorkerLoad, WorkerSnapshot
from tandem.errors import RequestTooLarge
from tandem.protocol.session_versions import ADAPTERS_SINCE, SPOKEN
from tests.support.router.reference_costs import PlacementRequest, held, pair_cost
from tests.support.router.worker_views import LAYOUT, demand_of, view_of, worker

EXACT = CostModel(tie_ms=0.0, tie_share=0.0)


def cluster_at_random(rng: Random) -> list[WorkerSnapshot]:
    def one(name: str) -> WorkerSnapshot:
        load = WorkerLoad(
            num_running=rng.randrange(50),
            num_free_blocks=rng.randrange(300),
            prefill_tokens_per_s=rng.choice([0.0, 50.0, 4_000.0, 9e3]),
            decode_step_s=rng.choice([0.0, 0.004, 0.2]),
            kv_bytes_per_s=rng.choice([0.0, 1e6, 1e10]),
            context_tokens=rng.choice([0, 0, 1000]),
        )
        return worker(
            name,
            load=load,
            backlog=rng.choice([0, rng.randrange(9_000)]),
            # No less than it says itself: nobody knows of less.
            active=load.num_running + rng.randrange(3),
            num_blocks=rng.choice([40, 300, 1000]),
            layout=rng.choice(
                [LAYOUT, LAYOUT, dataclasses.replace(LAYOUT, block_size=32), dataclasses.replace(LAYOUT, head_dim=4)]
            ),
            transports=rng.choice([frozenset(), frozenset({"tcp"}), frozenset({"shm"})]),
            draining=rng.random() < 0.2,
            penalty_ms=rng.choice([0.0, 0.0, 500.0]),
            version=rng.choice([SPOKEN.newest, SPOKEN.newest, SPOKEN.newest, ADAPTERS_SINCE - 1]),
        )

    return [one(f"d{i}") for i in range(rng.randint(1, 4))] + [one(f"p{i}") for i in range(rng.randint(0, 4))]


def ask_at_random(rng: Random, workers: list[WorkerSnapshot]) -> PlacementRequest:
    return PlacementRequest(
        num_tokens=rng.randint(1, rng.choice([100, 1500])),
        matched={w.info.key.worker_id: rng.choice([0, rng.randrange(1600)]) for w in workers},
        excluded=frozenset(w.info.key for w in workers if rng.random() < 0.15),
        replicate_tokens=rng.choice([0, 0, 256]),
        adapter_ms=rng.choice([None, {w.info.key.worker_id: rng.choice([0.0, 90.0]) for w in workers}]),
    )


def best_of(
    workers: list[WorkerSnapshot], request: PlacementRequest, decode: WorkerSnapshot, model: CostModel
) -> float:
    prefills = [w for w in workers if w.info.key.worker_id.startswith("p")]
    remote = min((pair_cost(decode, prefill, workers, request, model) for prefill in prefills), default=inf)
    most, uncached = model.max_local_prefill_tokens, request.num_tokens - held(decode, request)
    if most is not None and remote < inf and uncached > max(most, model.local_prefill_tokens):
        return remote
    return min(remote, pair_cost(decode, None, workers, request, model))


def placed(workers: list[WorkerSnapshot], request: PlacementRequest, model: CostModel, seed: int = 0) -> Placement:
    view = view_of(workers)
    excluded = [w for w in workers if w.info.key in request.excluded]
    by_name = None if request.adapter_ms is None else [request.load_ms(w) for w in workers]
    wanted = demand_of(
        view,
        request.num_tokens,
        *excluded,
        matched=request.matched,
        replicate_tokens=request.replicate_tokens,
        adapter_ms=by_name,
    )
    return place(wanted, view, model, Random(seed))


@pytest.mark.parametrize("few", [0, pricing.MAX_PRICED_SINGLY], ids=["by_columns", "one_by_one"])
def test_placement_costs_equal_plain_python(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "MAX_PRICED_SINGLY", few)
    rng, num_placed = Random(11), 0
    for _ in range(400):
        workers = cluster_at_random(rng)
        request = ask_at_random(rng, workers)
        decoders = [w for w in workers if w.info.key.worker_id.startswith("d")]
        model = replace(EXACT, max_local_prefill_tokens=rng.choice([None, 0, 300]))
        costs = {w.info.key: best_of(workers, request, w, model) for w in decoders}
        if not any(map(isfinite, costs.values())):
            with pytest.raises((NoDecodeWorker, RequestTooLarge)):
                placed(workers, request, model)
            continue
        num_placed += 1
        placement = placed(workers, request, model)
        # What is explained sums up to what was compared ...
        shown = {cost.key: cost.total_ms for cost in placement.decode_candidates}
        assert shown == pytest.approx({key: cost for key, cost in costs.items() if cost < inf}, rel=1e-9)
        # ... and the pair that was chosen is the cheapest of all pairs.
        assert placement.predicted_ms == pytest.approx(min(costs.values()), rel=1e-9)
        chosen = pair_cost(placement.decode, placement.prefill, workers, request, EXACT)
        assert placement.predicted_ms == pytest.approx(chosen, rel=1e-9)
        assert placement.decode_candidates[0].key == placement.decode.info.key
        if placement.prefill is not None:
            first = placement.prefill_candidates[0]
            assert first.key == placement.prefill.info.key
            assert first.total_ms + EXACT.handoff_ms == pytest.approx(placement.decode_candidates[0].handoff_ms)
    assert num_placed > 200


def test_placement_scalar_and_vectorised_paths_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, found, reasons = Random(12), [], set()
    cases = [(workers := cluster_at_random(rng), ask_at_random(rng, workers)) for _ in range(300)]
    for few in (0, pricing.MAX_PRICED_SINGLY):
        monkeypatch.setattr(pricing, "MAX_PRICED_SINGLY", few)
        decisions: list[object] = []
        for seed, (workers, asked) in enumerate(cases):
            try:
                made = placed(workers, asked, CostModel(), seed)
            except (NoDecodeWorker, RequestTooLarge) as error:
                decisions.append(str(error))
                continue
            reasons.add(made.reason)
            shown = (*made.decode_candidates, *made.prefill_candidates)
            decisions.append((made.decode, made.prefill, made.reason, made.affinity, made.predicted_ms, shown))
            decisions.append((made.work_tokens, made.compute_ms, made.held_by_decode, made.cached_tokens))
        found.append(decisions)
    assert found[0] == found[1]
    assert len(reasons) == 4


def test_placement_excluded_workers_are_never_chosen() -> None:
    rng, num_pairs = Random(12), 0
    for seed in range(400):
        workers = cluster_at_random(rng)
        request = ask_at_random(rng, workers)
        with suppress(NoDecodeWorker, RequestTooLarge):
            placement = placed(workers, request, CostModel(), seed)
            for one in (placement.decode, placement.computing):
                assert not one.draining
                assert one.info.key not in request.excluded
                assert one.info.pool_tokens > request.num_tokens
                assert request.adapter_ms is None or one.info.protocol_version >= ADAPTERS_SINCE
            if placement.prefill is not None:
                num_pairs += 1
                assert placement.decode.info.cannot_pair(placement.prefill.info) is None
            assert placement.cached_tokens + placement.uncached_tokens == request.num_tokens
            assert placement.uncached_tokens >= 1
    assert num_pairs > 40


def test_local_threshold_is_where_choice_changes() -> None:
    """For every decode worker: it prefills itself exactly when the uncached part is within its threshold."""
    rng, turns = Random(13), Counter[bool]()
    for _ in range(400):
        workers = [replace(w, load=replace(w.load, context_tokens=0)) for w in cluster_at_random(rng)]
        request = replace(ask_at_random(rng, workers), replicate_tokens=0)
        with suppress(NoDecodeWorker, RequestTooLarge):
            model = replace(EXACT, max_local_prefill_tokens=rng.choice([None, 300]))
            for cost in placed(workers, request, model).decode_candidates:
                uncached, threshold = request.num_tokens - cost.matched_tokens, cost.local_threshold_tokens
                assert threshold is not None
                if abs(uncached - threshold) > 1e-6 * uncached:
                    turns[uncached <= threshold] += 1
                    assert (cost.transfer_ms == cost.handoff_ms == 0.0) is (uncached <= threshold)
    assert min(turns[True], turns[False]) > 50


def test_local_threshold_respects_bounds() -> None:
    here = {"queue_ms": 10.0, "token_ms": 0.4, "link_ms": 0.1, "floor_tokens": 64}
    assert local_threshold(**here, handoff_ms=40.0) == pytest.approx(100.0)
    assert local_threshold(**here, handoff_ms=20.0) == 64.0
    assert local_threshold(**here, handoff_ms=40.0, most_tokens=70) == 70.0
    assert local_threshold(**here, handoff_ms=40.0, most_tokens=10) == 64.0
    assert local_threshold(**here, handoff_ms=inf, most_tokens=10) == inf
    assert local_threshold(**{**here, "link_ms": 0.4}, handoff_ms=11.0) == inf
    assert local_threshold(**{**here, "link_ms": 0.5}, handoff_ms=9.0) == 64.0


def test_placement_streams_favour_handoff() -> None:
    """A decode worker without streams computes the same prompt while the prefill pool is busy."""
    busy = worker("p0", backlog=400)
    assert placed([worker("d0"), busy], PlacementRequest(300, {}), EXACT).reason is PlacementReason.LOCAL_CHEAPER
    assert (
        placed([worker("d0", active=8), busy], PlacementRequest(300, {}), EXACT).reason is PlacementReason.DISAGGREGATED
    )


def test_placement_affinity_describes_prefix_influence() -> None:
    decode, busy = worker("d0", active=9), worker("p1", backlog=3_000)
    assert placed([decode, worker("p0")], PlacementRequest(500, {}), EXACT).affinity is Affinity.COLD
    assert (
        placed([decode, worker("p0"), worker("p1")], PlacementRequest(500, {"p1": 480}), EXACT).affinity
        is Affinity.PREFIX
    )
    assert placed([decode, worker("p0"), busy], PlacementRequest(500, {"p1": 480}), EXACT).affinity is Affinity.SPREAD
    closed = replace(worker("p1"), draining=True)
    assert placed([decode, worker("p0"), closed], PlacementRequest(500, {"p1": 480}), EXACT).affinity is Affinity.COLD


def test_placement_replica_goes_to_shortest_queue() -> None:
    decode, holder = worker("d0", active=9), worker("p1", backlog=100)
    workers = [decode, worker("p0"), worker("p2", backlog=50), holder]
    wanted = PlacementRequest(1000, {"p1": 960})
    assert placed(workers, wanted, EXACT).affinity is Affinity.PREFIX
    copied = placed(workers, replace(wanted, replicate_tokens=960), EXACT)
    assert copied.affinity is Affinity.REPLICA
    assert copied.computing.info.key.worker_id == "p0"
    assert (copied.cached_tokens, copied.uncached_tokens) == (0, 1000)
    idle = [decode, worker("p0"), replace(holder, backlog_tokens=0)]
    assert placed(idle, replace(wanted, replicate_tokens=960), EXACT).affinity is Affinity.PREFIX


def test_placement_recomputes_less_under_load() -> None:
    """With the same queue ahead: not worth waiting for with few requests, worth it with many."""
    decode, holder = worker("d0", active=30), worker("p1", backlog=500)
    wanted = PlacementRequest(600, {"p1": 480})
    idle = [decode, worker("p0"), holder]
    assert placed(idle, wanted, EXACT).affinity is Affinity.SPREAD
    crowded = [decode, worker("p0", active=1), replace(holder, num_active=1)]
    assert placed(crowded, wanted, EXACT).affinity is Affinity.PREFIX
    # Whether a prompt is handed over at all does not depend on what is not computed again.
    costs = [placed(workers, wanted, EXACT).decode_candidates[0] for workers in (crowded, [decode, crowded[2]])]
    assert costs[0].handoff_ms == costs[1].handoff_ms


def test_placement_cold_prompt_of_any_length_goes_to_least_loaded() -> None:
    """The margin for prediction errors grows with the cost, and must not hide a queue."""
    workers = [worker("d0", active=9), *(worker(f"p{i}", backlog=100 * i) for i in range(4))]
    large = [replace(w, info=replace(w.info, num_blocks=9_000)) for w in workers]
    for seed in range(10):
        assert placed(large, PlacementRequest(50_000, {}), CostModel(), seed).computing.info.key.worker_id == "p0"


def test_placement_ties_are_uniform() -> None:
    workers = [worker("d0", active=9), *(worker(f"p{i}") for i in range(5))]
    view, rng = view_of(workers), Random(4)
    wanted = demand_of(view, 500, matched={})
    picks = Counter(place(wanted, view, CostModel(), rng).computing.info.key.worker_id for _ in range(5_000))
    expected = 1_000
    chi_squared = sum((count - expected) ** 2 / expected for count in picks.values())
    assert len(picks) == 5
    assert chi_squared < 18.5  # p = 0.001 with 4 degrees of freedom
    again = [place(wanted, view, CostModel(), Random(7)).computing.info.key for _ in range(2)]
    assert again[0] == again[1]


def test_placement_context_makes_long_prompt_superlinear() -> None:
    grows = WorkerLoad(num_free_blocks=1000, prefill_tokens_per_s=5_000.0, context_tokens=1_000)
    decode = worker("d0", active=50)
    placement = placed([decode, worker("p0", load=grows)], PlacementRequest(1_000, {"p0": 0}), EXACT)
    assert (placement.uncached_tokens, placement.work_tokens) == (1_000, 1_500)
    behind = placed([decode, worker("p0", load=grows)], PlacementRequest(1_000, {"p0": 496}), EXACT)
    assert behind.work_tokens == 504 + round(504 * 1496 / 2 / 1000)
