"""`python -m tandem_bench.router.variants.sampled_router FILE ...`: a router whose processor time is sampled.

SIGUSR1 begins to sample, SIGUSR2 ends it and writes the stacks to FILE, a FIFO: collapsed, outermost frame first. The
kernel sends SIGPROF for every `PERIOD_S` of the process's time, and Python handles it between two instructions of the
event loop's thread: time in compiled code counts for the Python code that called it. A sample weighs as many
microseconds as that thread has used since the one before, so that the time of other threads counts for nothing.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

from router.__main__ import serve
from tandem.process.lifetime import end, router_main
from tandem.profiling.sampler import FrameNames
from tandem.profiling.stacks import StackTally, collapsed

PERIOD_S = 0.004
"""The kernel's own resolution of processor time, mostly."""


class ProcessorTimeSampler:
    """Counts stacks by processor time. Its methods are signal handlers, which Python runs on the main thread."""

    def __init__(self, file: Path) -> None:
        """`file`: the FIFO that the stacks are written to."""
        self._file = file
        self._names = FrameNames()
        self._tally = StackTally()
        self._counted_ns = 0

    def begin(self, _number: int, _frame: FrameType | None) -> None:
        self._tally = StackTally()
        self._counted_ns = time.thread_time_ns()
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def sample(self, _number: int, frame: FrameType | None) -> None:
        now_ns = time.thread_time_ns()
        if used_us := (now_ns - self._counted_ns) // 1_000:
            self._counted_ns = now_ns
            self._tally.add(self._names.stack(frame), used_us)

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """Stop, and write what was counted, to whoever reads the FIFO."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._file.write_text(collapsed(self._tally), encoding="utf-8")


if __name__ == "__main__":
    sampler = ProcessorTimeSampler(Path(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, sampler.begin)
    signal.signal(signal.SIGUSR2, sampler.end)
    signal.signal(signal.SIGPROF, sampler.sample)
    end(router_main(serve))
