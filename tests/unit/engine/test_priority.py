"""An engine's thread gives way to event loops, and nobody else does."""

import os
import sys
import threading

import pytest

from engine.backends.priority import NICENESS, step_back
from tests.unit.engine.kernels.test_cpu_threads import in_a_thread

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities belong to processes there")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_and_those_it_starts_step_back_alone():
    before = niceness()

    def work():
        step_back()
        return niceness(), in_a_thread(niceness)

    lowered = max(before, NICENESS)
    assert in_a_thread(work) == (lowered, lowered)
    assert niceness() == in_a_thread(niceness) == before


def test_who_is_nicer_already_stays_so():
    nicer = max(niceness(), NICENESS + 3)

    def work():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nicer)
        step_back()
        return niceness()

    assert in_a_thread(work) == nicer
