"""Timing of short pieces of Python: the minimum of many rounds, without the garbage collector."""

import gc
import time
from collections.abc import Callable


def least_us(work: Callable[[], object], *, repeats: int, calls: int = 1) -> float:
    """Return microseconds per call in the best of `repeats` rounds of `work`, which makes `calls` calls.

    Other activity on the machine only adds time: the minimum is closest to the cost of the work itself.
    """
    best = float("inf")
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            begun = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - begun)
    finally:
        if was_enabled:
            gc.enable()
    return best / calls * 1e6
