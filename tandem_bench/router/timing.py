"""How short pieces of Python are timed: the least of many rounds, without the garbage collector."""

import gc
import time
from collections.abc import Callable


def least_us(work: Callable[[], object], *, repeats: int, calls: int = 1) -> float:
    """Microseconds per call in the best of `repeats` rounds of `work`, which makes `calls` calls.

    Whatever else runs on the machine only ever adds: the least is the nearest to what the work itself takes.
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
