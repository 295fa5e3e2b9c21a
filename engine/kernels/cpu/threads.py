"""Which processors the compute threads run on.

Left alone, the system now and then puts two threads of a team on one processor, or another process beside one of them,
and moves neither while both seem busy: the other threads then spin at the next barrier for as long. Bound threads
were measured 4 % faster on a quiet machine and three times as fast on a busy one (docs/extend/measurements.md).
"""

import ctypes
import os

from engine.kernels.cpu.library import KernelLibrary


def bind_team(library: KernelLibrary, num_threads: int) -> int:
    """Give each thread of the calling thread's team a processor of its own; returns how many have one.

    None when there are fewer processors than threads, or when the system knows no such thing.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads > len(cpus):
        return 0
    chosen = (ctypes.c_int64 * num_threads)(*cpus[:num_threads])
    bound: int = library.function("tandem_bind_threads", "pi", "i")(ctypes.addressof(chosen), num_threads)
    return bound


def threads_of_one(wanted: int | None, num_sharers: int) -> int:
    """Threads of one process that computes on this machine beside others, which are `num_sharers` with it."""
    return wanted or max(1, num_processors() // max(1, num_sharers))


def num_processors() -> int:
    """Processors that this process may use: fewer than the machine has, in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
