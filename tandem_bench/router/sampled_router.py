"""`python -m tandem_bench.router.sampled_router FILE ...`: a router whose processor time is sampled.

SIGUSR1 begins to sample, SIGUSR2 ends it and writes the stacks to FILE, collapsed, outermost frame first. The kernel
sends SIGPROF for every `PERIOD_S` of processor time, and Python handles it between two instructions of the event loop's
thread: so waiting costs no samples, and time in compiled code counts for the Python code that called it. A sampling
thread, such as that of `/debug/profile`, is mostly let in where the loop waits or makes system calls.
"""

import os
import signal
import sys
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
        """`file`: where the stacks are written."""
        self._file = file
        self._names = FrameNames()
        self._tally = StackTally()

    def begin(self, _number: int, _frame: FrameType | None) -> None:
        self._tally = StackTally()
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def sample(self, _number: int, frame: FrameType | None) -> None:
        self._tally.add(self._names.stack(frame))

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """Stop, and write what was counted; the file appears whole."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        written = self._file.with_suffix(".part")
        written.write_text(collapsed(self._tally), encoding="utf-8")
        os.replace(written, self._file)


if __name__ == "__main__":
    sampler = ProcessorTimeSampler(Path(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, sampler.begin)
    signal.signal(signal.SIGUSR2, sampler.end)
    signal.signal(signal.SIGPROF, sampler.sample)
    end(router_main(serve))
