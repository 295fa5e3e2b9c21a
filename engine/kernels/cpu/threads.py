"""Assigns processors to compute threads.

Unbound, two threads of a team now and then share one processor, or one shares it with another process, and the system
moves neither while both seem busy: meanwhile the other threads spin at the next barrier. Bound threads
were measured 4 % faster on a quiet machine and three times as fast on a busy one (docs/extend/measurements.md).
"""

import ctypes
import os

from engine.kernels.cpu.library import KernelLibrary


def bind_team(library: KernelLibrary, num_threads: int) -> int:
    """Bind each thread of the calling thread's team to a processor of its own. Returns the number of threads bound.

    It is 0 when there are fewer processors than threads, or when the system does not support binding.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads > len(cpus):
        return 0
    chosen = (ctypes.c_int64 * num_threads)(*cpus[:num_threads])
    bound: int = library.function("tandem_bind_threads", "pi", "i")(ctypes.addressof(chosen), num_threads)
    return bound


def threads_per_process(wanted: int | None, num_sharers: int) -> int:
    """Compute threads of one process: `wanted`, or its share of the processors among `num_sharers` processes."""
    return wanted or max(1, num_processors() // max(1, num_sharers))


def num_processors() -> int:
    """Number of processors that this process may use: fewer than the machine's in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
