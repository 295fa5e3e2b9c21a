"""Admission: a hard bound, a reserve for what is not background work, and an honest Retry-After."""

from contextlib import ExitStack

import pytest

from router.admission.concurrency_limit import Admission
from tandem.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_bound_holds_and_places_come_back() -> None:
    admission = Admission(max_inflight=3, clock=Clock())
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.admit(0))
        with pytest.raises(Overloaded), admission.admit(0):
            pass
        assert admission.num_inflight == 3
    assert admission.num_inflight == 0
    with admission.admit(0):
        assert admission.num_inflight == 1


def test_place_comes_back_after_an_error() -> None:
    admission = Admission(max_inflight=1, clock=Clock())
    with pytest.raises(ZeroDivisionError), admission.admit(0):
        raise ZeroDivisionError
    assert admission.num_inflight == 0


def test_background_work_leaves_room() -> None:
    admission = Admission(max_inflight=4, clock=Clock())
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.admit(5))
        with pytest.raises(Overloaded), admission.admit(1):
            pass
        stack.enter_context(admission.admit(0))
        with pytest.raises(Overloaded), admission.admit(-5):
            pass


def test_retry_after_follows_durations_and_the_crowd() -> None:
    clock = Clock()
    admission = Admission(max_inflight=2, clock=clock, prior_s=1.0)
    for _ in range(60):
        with admission.admit(0):
            clock.now_s += 8.0
    told = []
    with admission.admit(0), admission.admit(0):
        for _ in range(3):
            with pytest.raises(Overloaded) as caught, admission.admit(0):
                pass
            told.append(caught.value.retry_after_s)
    # Each of two places is held for 8 s: one comes free every 4 s.
    assert told == [pytest.approx(n, rel=0.01) for n in (4.0, 8.0, 12.0)]


def test_retry_after_has_bounds() -> None:
    clock = Clock()
    admission = Admission(max_inflight=1, clock=clock, prior_s=0.0)
    assert admission.retry_after_s() == 0.1
    with admission.admit(0):
        clock.now_s += 1e6
    with admission.admit(0), pytest.raises(Overloaded) as caught, admission.admit(0):
        pass
    assert caught.value.retry_after_s == 60.0
