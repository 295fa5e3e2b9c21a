"""Why requests wait for admission: the pool without room, or the router itself."""

import pytest
from msgspec.structs import replace

from router.admission.cluster_capacity import Shortage
from router.types.worker_view import WorkerLoad
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.overload_world import snapshot
from tests.support.router.worker_views import worker


def _held(bench: AdmissionBench) -> dict[Shortage, tuple[int, int]]:
    sums = bench.admission.held()
    return {lack: (one.num_requests, one.num_tokens) for lack, one in sums.items() if one.num_requests}


@pytest.mark.parametrize(
    ("prefill_backlog", "decoding", "lack"),
    [(5000, 1, Shortage.PREFILL), (0, 8, Shortage.DECODE), (5000, 8, Shortage.BOTH)],
    ids=lambda value: getattr(value, "value", value),
)
def test_admission_queue_is_counted_under_the_short_pool(prefill_backlog: int, decoding: int, lack: Shortage) -> None:
    bench = AdmissionBench()
    prefill = replace(worker("p0", backlog=prefill_backlog), load=WorkerLoad(prefill_tokens_per_s=1000.0))
    bench.workers = [prefill, snapshot(active=decoding)]
    for _ in range(3):
        bench.enter(tokens=200)
    assert _held(bench) == {lack: (3, 600)}


def test_queue_without_prefill_pool_waits_for_decode_workers() -> None:
    bench = AdmissionBench()
    bench.fill()
    bench.enter()
    assert _held(bench) == {Shortage.DECODE: (1, 100)}


def test_queue_behind_first_request_counts_under_its_shortage() -> None:
    """The first leaves no room in the pool for what follows; where it leaves some, others run: `test_overtaking`."""
    bench = AdmissionBench(max_queue_s=1000.0)
    bench.workers = [replace(snapshot(active=1), load=WorkerLoad(num_free_blocks=10))]
    large, small = bench.enter(tokens=159_995), bench.enter(tokens=10)
    assert (large.waiting, small.waiting) == (True, True)
    assert _held(bench) == {Shortage.DECODE: (2, 160_005)}


def test_admission_shortage_is_router_for_places_and_decode_for_refusals() -> None:
    bench = AdmissionBench()
    bench.places = 0
    bench.enter()
    assert _held(bench) == {Shortage.ROUTER: (1, 100)}
    bench.num_refused = 1
    assert _held(bench) == {Shortage.DECODE: (1, 100)}
    bench.places = 10
    assert bench.turns() == []
    bench.num_refused = 0
    assert len(bench.turns()) == 1
    assert _held(bench) == {}
