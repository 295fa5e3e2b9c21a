"""Placement: the chosen worker, the reason, and choices that must never occur."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.placement import worker_selection as placing
from router.placement.costs import CostModel
from router.placement.demand import PlacementDemand
from router.placement.prefix_holders import best_holder
from router.placement.worker_selection import Affinity, NoDecodeWorker, Placement, PlacementReason
from router.types.worker_view import WorkerKey, WorkerLoad, WorkerSnapshot
from tandem.errors import RequestTooLarge
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tests.support.router.worker_views import LAYOUT, Wanted, demand, view_of, worker

MODEL = CostModel()


def place(wanted: Wanted, workers: Sequence[WorkerSnapshot], model: CostModel, rng: Random) -> Placement:
    view = view_of(workers)
    return placing.place(wanted(view), view, model, rng)


def place_prefill(
    wanted: Wanted, decode: WorkerSnapshot, workers: Sequence[WorkerSnapshot], model: CostModel, rng: Random
) -> str | None:
    view = view_of(workers)
    found = placing.place_prefill(wanted(view), decode, view, model, rng)
    return None if found is None else found[0].info.key.worker_id


def chosen(wanted: PlacementDemand, *workers: WorkerSnapshot, seed: int = 0) -> tuple[str, str | None]:
    placement = place(wanted, workers, MODEL, Random(seed))
    prefill = placement.prefill
    return placement.decode.info.key.worker_id, prefill.info.key.worker_id if prefill else None


def test_placement_long_prompt_is_disaggregated() -> None:
    placement = place(demand(500), [worker("d0"), worker("p0")], MODEL, Random(0))
    assert placement.reason is PlacementReason.DISAGGREGATED
    assert placement.computing.info.key.worker_id == "p0"
    assert (placement.cached_tokens, placement.uncached_tokens) == (0, 500)
    assert placement.affinity is Affinity.COLD
    assert placement.predicted_ms == pytest.approx(placement.decode_candidates[0].total_ms)


@pytest.mark.parametrize(("tokens", "local"), [(1, True), (64, True), (65, False)])
def test_placement_short_prompt_is_computed_on_decode_worker(tokens: int, local: bool) -> None:
    placement = place(demand(tokens), [worker("d0"), worker("p0")], MODEL, Random(0))
    assert (placement.prefill is None) is local
    assert (placement.reason is PlacementReason.SHORT_SUFFIX) is local


def test_placement_threshold_counts_uncached_tokens() -> None:
    workers = [worker("d0"), worker("p0")]
    assert chosen(demand(500, d0=448), *workers) == ("d0", None)
    assert chosen(demand(500, d0=400, p0=400), *workers) == ("d0", "p0")
    placement = place(demand(500, d0=448), workers, MODEL, Random(0))
    assert (placement.cached_tokens, placement.uncached_tokens) == (448, 52)


def test_placement_without_prefill_workers_is_local() -> None:
    placement = place(demand(500), [worker("d0")], MODEL, Random(0))
    assert placement.reason is PlacementReason.NO_PREFILL_WORKER
    assert placement.computing.info.key.worker_id == "d0"


def test_placement_prefers_cached_prefix() -> None:
    for seed in range(10):
        assert chosen(demand(500, p1=320), worker("d0"), worker("p0"), worker("p1"), seed=seed) == ("d0", "p1")


def test_placement_hot_prefix_spreads_when_queue_exceeds_compute() -> None:
    hot, cold = worker("p1", backlog=300), worker("p0")
    assert chosen(demand(500, p1=320), worker("d0"), cold, hot) == ("d0", "p1")
    hot = worker("p1", backlog=400)
    assert chosen(demand(500, p1=320), worker("d0"), cold, hot) == ("d0", "p0")


def test_placement_hot_worker_keeps_affinity_of_others() -> None:
    workers = [worker("d0"), worker("p0", backlog=10_000), worker("p1"), worker("p2")]
    assert chosen(demand(500, p0=480, p1=320), *workers) == ("d0", "p1")


def test_placement_prefers_least_loaded_decode_worker() -> None:
    assert chosen(demand(500), worker("d0", active=9), worker("d1", active=2), worker("p0"))[0] == "d1"


def test_placement_uses_measured_rates() -> None:
    slow = worker("p0", load=WorkerLoad(prefill_tokens_per_s=1_000.0))
    fast = worker("p1", load=WorkerLoad(prefill_tokens_per_s=10_000.0), backlog=2_000)
    decode = worker("d0", active=50)
    assert chosen(demand(500), decode, slow, fast)[1] == "p1"
    fast = replace(fast, backlog_tokens=6_000)
    assert chosen(demand(500), decode, slow, fast)[1] == "p0"


def test_placement_unmeasured_worker_uses_pool_mean() -> None:
    measured = worker("p0", load=WorkerLoad(prefill_tokens_per_s=100.0))
    placement = place(demand(500), [worker("d0"), measured, worker("p1")], MODEL, Random(0))
    assert [cost.compute_ms for cost in placement.prefill_candidates] == pytest.approx([5_000.0, 5_000.0])


def test_placement_avoids_slow_link() -> None:
    slow = worker("d0", load=WorkerLoad(num_free_blocks=1000, kv_bytes_per_s=1e5))
    fast = worker("d1", load=WorkerLoad(num_free_blocks=1000, kv_bytes_per_s=1e9))
    assert chosen(demand(500), slow, fast, worker("p0"))[0] == "d1"


def test_placement_prefers_decode_worker_holding_prefix() -> None:
    link = WorkerLoad(num_free_blocks=1000, kv_bytes_per_s=1e6)
    pair = worker("d0", load=link, active=9), worker("d1", load=link, active=9)
    assert chosen(demand(500, d1=400), *pair, worker("p0")) == ("d1", "p0")


def test_placement_avoids_full_memory() -> None:
    full = worker("d0", load=WorkerLoad(num_free_blocks=1, num_running=2))
    assert chosen(demand(500), full, worker("d1"), worker("p0"))[0] == "d1"


def test_placement_penalty_repels_but_does_not_exclude() -> None:
    punished = replace(worker("d0"), penalty_ms=2_000.0)
    assert chosen(demand(), punished, worker("d1")) == ("d1", None)
    assert chosen(demand(), punished) == ("d0", None)


def test_placement_incompatible_layouts_are_never_paired() -> None:
    other = worker("p0", layout=dataclasses.replace(LAYOUT, dtype="bfloat16"))
    assert chosen(demand(500), worker("d0"), other) == ("d0", None)
    assert chosen(demand(500), worker("d0", active=50), other, worker("p1", backlog=10**4)) == ("d0", "p1")


def test_placement_without_common_transport_is_never_paired() -> None:
    decode = worker("d0", transports=frozenset({"tcp"}))
    assert chosen(demand(500), decode, worker("p0", transports=frozenset({"shm"}))) == ("d0", None)
    assert chosen(demand(500), decode, worker("p0", transports=frozenset({"shm", "tcp"}))) == ("d0", "p0")


_KINDS = st.builds(
    lambda tp, heads, dtype, block_size, fingerprint: dataclasses.replace(
        LAYOUT, tp_size=tp, num_kv_heads=heads, dtype=dtype, block_size=block_size, model_fingerprint=fingerprint
    ),
    tp=st.sampled_from([1, 2, 4]),
    heads=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    block_size=st.sampled_from([16, 32]),
    fingerprint=st.sampled_from(["m", "m", "n"]),
)
_WAYS = st.frozensets(st.sampled_from(["shm", "tcp", "nixl"]), min_size=1)


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.tuples(_KINDS, _WAYS, st.integers(0, 4_096)), min_size=2, max_size=6),
    num_decoders=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_placement_never_chooses_an_impossible_pair(
    kinds: list[tuple[KVLayout, frozenset[str], int]], num_decoders: int, seed: int
) -> None:
    """Not at first, not after a failed hand-off, and not as the holder of a prefix."""
    workers = [
        worker(f"d{i}" if i < num_decoders else f"p{i}", layout=layout, transports=ways)
        for i, (layout, ways, _) in enumerate(kinds)
    ]
    wanted = demand(500, **{w.info.key.worker_id: held for w, (*_, held) in zip(workers, kinds, strict=True)})
    view = view_of(workers)
    placement = placing.place(wanted(view), view, MODEL, Random(seed))
    decode = placement.decode.info
    if placement.prefill is not None:
        assert decode.cannot_pair(placement.prefill.info) is None
    others = [w for w in workers if w.info.key.worker_id[0] == "p"]
    again = place_prefill(demand(500), placement.decode, workers, MODEL, Random(seed))
    fit = {w.info.key.worker_id for w in others if decode.cannot_pair(w.info) is None}
    assert (again in fit) if fit else (again is None), "another pair, or none: never one that cannot work"
    holder = best_holder(wanted(view), placement.computing.info, view, lambda _, held: held)
    if holder is not None:
        lender = next(w.info for w in workers if w.info.key.worker_id == holder.worker_id)
        assert lender.cannot_send_to(placement.computing.info) is None


def test_placement_draining_or_excluded_workers_get_nothing() -> None:
    decode, prefill = worker("d0"), worker("p0")
    draining = replace(worker("p1"), draining=True)
    assert chosen(demand(500, prefill), decode, prefill, draining) == ("d0", None)
    with pytest.raises(NoDecodeWorker, match="none of 2 decode workers"):
        place(demand(500, decode), [decode, replace(worker("d1"), draining=True)], MODEL, Random(0))


@pytest.mark.parametrize("num_workers", [3, 20], ids=["singly", "by columns"])
def test_placement_for_only_one_worker_chooses_it_for_everything(num_workers: int) -> None:
    workers = [worker(f"{pool}{i}") for pool in "dp" for i in range(num_workers)]
    for key in (workers[1].info.key, workers[2].info.key):
        wanted = demand(500, only=key, d0=480, p0=480)
        assert chosen(wanted, *workers) == (key.worker_id, None)
        view = view_of(workers)
        assert best_holder(wanted(view), view.decode.members.infos[1], view, lambda _, held: held) is None
    draining = replace(workers[1], draining=True)
    with pytest.raises(NoDecodeWorker):
        chosen(demand(500, only=draining.info.key), draining, workers[2])
    with pytest.raises(NoDecodeWorker):
        chosen(demand(500, only=workers[1].info.key), workers[0], workers[2])


def test_placement_restarted_worker_is_not_excluded() -> None:
    old = worker("d0")
    new = replace(old, info=replace(old.info, key=WorkerKey(WorkerId("d0"), Incarnation(2))))
    assert chosen(demand(10, old), new) == ("d0", None)


def test_placement_without_workers_raises() -> None:
    with pytest.raises(NoDecodeWorker):
        place(demand(), [worker("p0")], MODEL, Random(0))


def test_placement_request_larger_than_every_pool_is_refused() -> None:
    with pytest.raises(RequestTooLarge, match="the largest pool holds 480"):
        place(demand(480), [worker("d0", num_blocks=30), worker("d1", num_blocks=20)], MODEL, Random(0))
    assert chosen(demand(479), worker("d0", num_blocks=30), worker("d1", num_blocks=20)) == ("d0", None)


def test_placement_too_small_prefill_worker_is_skipped() -> None:
    assert chosen(demand(500), worker("d0"), worker("p0", num_blocks=10)) == ("d0", None)


def test_placement_ties_are_broken_randomly() -> None:
    workers = [worker(f"d{i}") for i in range(3)] + [worker(f"p{i}") for i in range(3)]
    rng, view = Random(1), view_of(workers)
    wanted = demand(500)(view)
    picks: Counter[tuple[str, str]] = Counter()
    for _ in range(900):
        placement = placing.place(wanted, view, MODEL, rng)
        assert placement.prefill is not None
        picks[placement.decode.info.key.worker_id, placement.prefill.info.key.worker_id] += 1
    assert len(picks) == 9
    assert min(picks.values()) > 50
    assert chosen(demand(500), *workers, seed=7) == chosen(demand(500), *workers, seed=7)


def test_placement_cached_prompt_computes_last_token() -> None:
    placement = place(demand(512, d0=512), [worker("d0")], MODEL, Random(0))
    assert (placement.cached_tokens, placement.uncached_tokens) == (496, 16)


def test_placement_match_is_rounded_to_worker_blocks() -> None:
    coarse = worker("d0", layout=dataclasses.replace(LAYOUT, block_size=64))
    assert place(demand(500, d0=144), [coarse], MODEL, Random(0)).cached_tokens == 128


def test_placement_reroute_keeps_decode_worker() -> None:
    decode, one, two = worker("d0"), worker("p0"), worker("p1")
    again = place_prefill(demand(500, one), decode, [decode, one, two], MODEL, Random(0))
    assert again == "p1"
    assert place_prefill(demand(500, one, two), decode, [decode, one, two], MODEL, Random(0)) is None


_LOADS = st.builds(
    WorkerLoad,
    num_running=st.integers(0, 300),
    num_free_blocks=st.integers(0, 1000),
    prefill_tokens_per_s=st.sampled_from([50.0, 9e3]),
    decode_step_s=st.sampled_from([0.004, 0.2]),
    kv_bytes_per_s=st.sampled_from([1e6, 1e10]),
)


@settings(max_examples=50, deadline=None)
@given(
    decoders=st.lists(st.tuples(_LOADS, st.integers(0, 9_000), st.integers(0, 4_096)), min_size=1, max_size=3),
    prefillers=st.lists(st.tuples(_LOADS, st.integers(0, 9_000), st.integers(0, 4_096)), min_size=1, max_size=3),
    tokens=st.integers(1, 4_000),
    seed=st.integers(0, 99),
)
def test_placement_finds_cheapest_pair(
    decoders: list[tuple[WorkerLoad, int, int]],
    prefillers: list[tuple[WorkerLoad, int, int]],
    tokens: int,
    seed: int,
) -> None:
    """The linear search against all pairs, each priced alone; a tie's margin may be taken once in each pool."""
    alone = replace(MODEL, recompute_weight=0.0)
    named = {f"d{i}": d for i, d in enumerate(decoders)} | {f"p{i}": p for i, p in enumerate(prefillers)}
    workers = {name: worker(name, load=load, backlog=backlog) for name, (load, backlog, _) in named.items()}
    wanted = demand(tokens, **{name: matched for name, (_, _, matched) in named.items()})
    best = place(wanted, list(workers.values()), alone, Random(seed))
    assert best.cached_tokens + best.uncached_tokens == tokens
    assert 0 <= best.cached_tokens < tokens
    for d in (w for name, w in workers.items() if name[0] == "d"):
        for p in (w for name, w in workers.items() if name[0] == "p"):
            pair = place(wanted, [d, p], alone, Random(seed))
            assert best.predicted_ms <= (pair.predicted_ms * 1.02 + 0.5) * 1.02 + 0.5 + 1e-6
