"""Prompts prefilled by decode workers: admission recognises them as placement does, and lets them pass."""

import dataclasses
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.admission.cluster_capacity import CapacityPolicy, Shortage
from router.admission.local_prefill_capacity import LocalPrefillCapacity, local_prefill_capacity
from router.admission.types import AdmissionRequest
from router.placement.costs import CostModel
from router.placement.worker_selection import place
from router.types.worker_view import WorkerLoad, WorkerSnapshot
from tandem.errors import Unavailable
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker
from tests.support.router.admission_queues import gated
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.cluster import LONG_PROMPT, collect, routed
from tests.support.router.worker_views import LAYOUT, demand_of, view_of, worker

EXACT = CostModel(tie_ms=0.0, tie_share=0.0)
_MANY = 10**6


def reader(backlog: int, rate: float = 1000.0, name: str = "p0", **fields: float) -> WorkerSnapshot:
    load = WorkerLoad(num_free_blocks=_MANY, prefill_tokens_per_s=rate)
    return worker(name, backlog=backlog, num_blocks=_MANY, load=load, **fields)


def writer(*, active: int = 1, backlog: int = 0, free_blocks: int = _MANY, link: float = 0.0) -> WorkerSnapshot:
    load = WorkerLoad(num_free_blocks=free_blocks, prefill_tokens_per_s=1000.0, num_running=active, kv_bytes_per_s=link)
    return worker("d0", active=active, backlog=backlog, num_blocks=_MANY, load=load)


def room_of(workers: list[WorkerSnapshot], model: CostModel) -> LocalPrefillCapacity:
    found = local_prefill_capacity(
        view_of(workers), model, np.array([0]), backlog_s=0.25, transit_tokens=0.0, now_s=0.0
    )
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(60))
def test_local_prefill_threshold_agrees_with_placement(seed: int) -> None:
    rng = Random(seed)
    model = replace(
        EXACT,
        local_prefill_tokens=rng.choice([0, 64]),
        max_local_prefill_tokens=rng.choice([None, None, 300]),
        stall_share=rng.choice([0.0, 1.0]),
    )
    rate = rng.choice([300.0, 1000.0, 8000.0])
    readers = [reader(rng.randrange(20_000), rate, f"p{i}", penalty_ms=rng.choice([0.0, 900.0])) for i in range(3)]
    decode = writer(active=rng.randrange(9), backlog=rng.choice([0, 4000]), link=rng.choice([0.0, 1e6]))
    workers = [decode, *(readers if rng.random() < 0.9 else [])]
    view = view_of(workers)
    most = room_of(workers, model).most_tokens

    def prefills_locally(num_tokens: int) -> bool:
        placed = place(demand_of(view, num_tokens, matched={}), view, model, Random(1))
        return placed.prefill is None

    if most < 10_000_000:
        assert most < 1 or prefills_locally(int(most))
        assert not prefills_locally(int(most) + 2)
    else:
        assert prefills_locally(1_000_000)


def bench(*workers: WorkerSnapshot, costs: CostModel | None = EXACT) -> AdmissionBench:
    """Room for a tenth of a second of prefill per worker, and eight requests at once."""
    made = AdmissionBench(
        room=CapacityPolicy(worker_backlog_s=0.1, max_running_per_worker=8, costs=costs), max_queue_s=100.0
    )
    made.workers = list(workers)
    return made


def test_local_prefill_short_prompt_passes_queued_long_ones() -> None:
    full = bench(writer(), reader(5000))
    long = [full.enter(tokens=9000) for _ in range(3)]
    short = [full.enter(tokens=40) for _ in range(2)]
    assert [entry.waiting for entry in (*long, *short)] == [True] * 3 + [False] * 2
    held = full.admission.held()
    assert (held[Shortage.PREFILL].num_requests, full.admission.num_waiting) == (3, 3)
    # Without placement's costs nobody knows which prompts these are.
    blind = bench(writer(), reader(5000), costs=None)
    assert [blind.enter(tokens=tokens).waiting for tokens in (9000, 40)] == [True, True]


def test_local_prefill_short_prompt_waits_only_for_decode_worker() -> None:
    full = bench(writer(backlog=500), reader(5000))
    long, first, second = full.enter(tokens=9000), full.enter("b", tokens=40), full.enter("c", tokens=60)
    assert (long.waiting, first.waiting, second.waiting) == (True, True, True)
    assert full.admission.held()[Shortage.DECODE].num_requests == 2
    full.workers = [writer(), reader(5000)]
    assert full.turns() == [first, second]
    # On their way they count as reading of decode workers.
    assert full.enter(tokens=64).waiting
    full.workers = [writer(), reader(50)]
    assert full.turns()[:1] == [long], "the first in line goes as soon as there is room for it"


@pytest.mark.parametrize(
    ("decode", "places"),
    [(writer(active=7), _MANY), (writer(free_blocks=565), _MANY), (writer(), 1)],
    ids=["slots", "memory", "places"],
)
def test_local_prefill_passing_prompt_leaves_room_for_first_in_line(decode: WorkerSnapshot, places: int) -> None:
    """One slot, or 9,040 tokens of KV, is free: what the long prompt needs once the prefill pool has room."""
    tight = bench(decode, reader(5000))
    tight.places = places
    assert tight.enter(tokens=9000).waiting
    assert tight.enter(tokens=40).waiting
    assert tight.turns() == []


def test_local_prefill_does_not_pass_request_waiting_for_decode() -> None:
    """Otherwise short requests would take the memory that it waits for, again and again."""
    full = bench(writer(free_blocks=200), reader(5000))
    assert full.enter(tokens=9000).waiting
    assert full.enter(tokens=40).waiting
    assert full.turns() == []
    assert full.admission.held()[Shortage.BOTH].num_requests == 2


def test_local_prefill_wait_is_predicted_by_decode_load() -> None:
    full = bench(writer(backlog=500), reader(5000))
    for _ in range(4):
        full.enter(tokens=9000)
    with pytest.raises(Unavailable):
        full.enter(tokens=9000, within_s=2.0)
    # Half a second of reading is before it, and two such prompts.
    assert all(full.enter(tokens=60, within_s=2.0).waiting for _ in range(2))
    with pytest.raises(Unavailable):
        full.enter(tokens=60, within_s=0.6)
    wanted = AdmissionRequest(tenant="a", priority=0, num_tokens=60, max_output_tokens=1, deadline_s=None)
    assert full.admission.predicted_first_token_s(wanted) == pytest.approx(0.5 + 0.12 + 0.06)


@pytest.mark.parametrize("lacks_decode", [False, True])
def test_local_prefill_forecast_behind_blocked_first_equals_its_wait(lacks_decode: bool) -> None:
    """The first has no room for its KV either, so the short one behind it is not prefilled soon."""
    full = bench(writer(free_blocks=200 if lacks_decode else _MANY), reader(5000))
    assert full.enter(tokens=9000).waiting
    wanted = AdmissionRequest(tenant="a", priority=0, num_tokens=40, max_output_tokens=1, deadline_s=None)
    least_s = 5.0 + 9.0 if lacks_decode else 0.0
    assert least_s <= full.admission.predicted_first_token_s(wanted) < least_s + 1.0
    if lacks_decode:
        with pytest.raises(Unavailable):
            full.enter(tokens=40, within_s=6.0)


def test_local_prefill_unpaired_decode_worker_does_not_raise_threshold() -> None:
    alone = worker("d1", layout=dataclasses.replace(LAYOUT, dtype="bfloat16"), num_blocks=_MANY, load=writer().load)
    pair = [writer(), reader(5000)]
    found = local_prefill_capacity(
        view_of([*pair, alone]), EXACT, np.array([0, 1]), backlog_s=0.25, transit_tokens=0.0, now_s=0.0
    )
    assert found is not None
    assert found.most_tokens == room_of(pair, EXACT).most_tokens
    full = bench(*pair, alone)
    too_long = int(found.most_tokens) + 1000
    assert [full.enter(tokens=tokens).waiting for tokens in (9000, too_long, 40)] == [True, True, False]


@pytest.mark.parametrize("is_local", [False, True])
def test_local_prefill_request_stays_local_despite_cached_prefix(is_local: bool) -> None:
    """Otherwise passing requests would keep the prefill pool busy, for which the passed one waits."""
    view = view_of([writer(active=8), reader(200)])
    placed = place(demand_of(view, 400, matched={"p0": 380}, is_local=is_local), view, EXACT, Random(1))
    assert (placed.prefill is None) is is_local


@pytest.mark.parametrize("is_local", [False, True])
async def test_local_prefill_dispatches_passed_entry(is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    room = LocalPrefillCapacity(most_tokens=1e3, always_tokens=0, slack_tokens=1e6, tokens_per_s=1e3, wait_s=0.0)
    async with gated(FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)) as (gate, core):
        watch = gate.queue.admission._watch
        measure = watch.measure
        if is_local:
            monkeypatch.setattr(watch, "measure", lambda: replace(measure(), slack_tokens=0.0, local=room))
        await collect(gate.generate(routed(LONG_PROMPT)))
        assert core.observed.modes == ["local_cheaper" if is_local else "disaggregated"]


def test_local_prefill_tenants_pass_in_fair_order() -> None:
    full = bench(writer(backlog=500), reader(5000))
    full.enter("x", tokens=9000)
    greedy = [full.enter("greedy", tokens=60) for _ in range(3)]
    modest = full.enter("modest", tokens=60)
    full.workers = [writer(), reader(5000)]
    assert full.turns() == [greedy[0], modest]


def test_local_prefill_queue_leaves_no_idle_room() -> None:
    full = bench(writer(), reader(5000))
    assert not full.admission.has_idle_room()
    assert bench(writer(), reader(0)).admission.has_idle_room()
