"""CPU binding: a team's threads have their own processors, and no other thread is bound."""

import os
import threading

import pytest
import torch

from engine.kernels.cpu.gemm import Arithmetic, PackedLinear
from engine.kernels.cpu.library import load_kernels
from engine.kernels.cpu.threads import bind_team, num_processors


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(num_processors() < 2, reason="needs two processors")
def test_cpu_threads_are_bound_to_one_processor_each():
    library, before = load_kernels(), os.sched_getaffinity(0)
    linear = PackedLinear(library, torch.randn(64, 64), arithmetic=Arithmetic.FLOAT32, num_threads=2)
    x, out = torch.randn(100, 64), torch.empty(100, 64)

    def work():
        assert bind_team(library, 2) == 2
        linear(x, out)
        return os.sched_getaffinity(0)

    assert in_a_thread(work) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_cpu_threads_beyond_processors_are_unbound():
    library, before = load_kernels(), os.sched_getaffinity(0)
    assert bind_team(library, len(before) + 1) == 0
    assert os.sched_getaffinity(0) == before
