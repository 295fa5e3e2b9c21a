"""Bounds of prepared and running requests; those of the queue: `test_fair_admission`, `test_overload`."""

from contextlib import ExitStack

import pytest

from router.admission.queue_limits import InflightLimit, PreparationLimit
from router.admission.types import AdmissionPolicy
from tandem.errors import Overloaded
from tests.support.router.admission_world import AdmissionBench


def test_inflight_limit_reserves_share_for_foreground() -> None:
    num_running = 0
    limit = InflightLimit(AdmissionPolicy(max_inflight=4), lambda: num_running)
    assert [limit.num_free(priority) for priority in (-5, 0, 1)] == [4, 4, 3]
    num_running = 3
    assert [limit.num_free(priority) for priority in (-5, 0, 1)] == [1, 1, 0]
    num_running = 5  # a stream that goes on has a place whatever is free
    assert [limit.num_free(priority) for priority in (0, 1)] == [-1, -2]


def test_inflight_limit_of_one_admits_background() -> None:
    assert InflightLimit(AdmissionPolicy(max_inflight=1), int).num_free(1) == 1


def test_background_requests_wait_while_foreground_runs() -> None:
    bench = AdmissionBench()
    bench.places = 10**6 // 4  # three quarters are taken
    assert not bench.enter(priority=0).waiting
    assert bench.enter(priority=1).waiting


def test_preparation_limit_refuses_beyond_bound_and_frees_slots() -> None:
    limit = PreparationLimit(2)
    with limit.preparing():
        with pytest.raises(ZeroDivisionError), limit.preparing():
            raise ZeroDivisionError
        with limit.preparing(), pytest.raises(Overloaded, match="2 requests are waiting to be tokenized") as caught:
            limit.preparing().__enter__()
    assert caught.value.retry_after_s == 1.0
    with limit.preparing(), limit.preparing():
        pass


def test_preparation_limit_leaves_places_for_other_tenants() -> None:
    limit = PreparationLimit(8)

    def fill(tenant: str) -> int:
        for count in range(9):
            try:
                inside.enter_context(limit.preparing(tenant))
            except Overloaded:
                return count
        return 9

    with ExitStack() as inside:
        assert [fill(tenant) for tenant in "abc"] == [4, 2, 1]
        inside.enter_context(limit.preparing("d"))
        with pytest.raises(Overloaded, match="8 requests are waiting"):
            limit.preparing("e").__enter__()
    with limit.preparing("a"), limit.preparing("a"):
        pass


def test_preparation_limit_holds_tenants_own_limit() -> None:
    bounds = {"a": 1}
    limit = PreparationLimit(8, bounds.get)
    with limit.preparing("a"):
        with pytest.raises(Overloaded, match="concurrent_requests of 1") as caught:
            limit.preparing("a").__enter__()
        with limit.preparing("b"), limit.preparing("b"):
            pass
    assert caught.value.param == "concurrent_requests"
    with limit.preparing("a"):
        pass
