"""`python -m tandem_bench.router.variants.counted_router FILE ...`: a router whose calls of functions are counted.

SIGUSR1 begins to count, SIGUSR2 ends it and writes the counts to FILE, a FIFO: one line per function. Only calls on
the event loop's thread count. Unlike processor time they are nearly the same in every run, on every machine.
"""

import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from router.__main__ import serve
from tandem.process.lifetime import end, router_main
from tandem.profiling.sampler import FrameNames
from tandem.profiling.stacks import StackTally, collapsed


class CallCounter:
    """Counts calls by function. Its methods are signal handlers, which Python runs on the main thread."""

    def __init__(self, file: Path) -> None:
        """`file`: the FIFO that the counts are written to."""
        self._file = file
        self._names = FrameNames()
        self._calls: Counter[CodeType] = Counter()

    def begin(self, _number: int, _frame: FrameType | None) -> None:
        self._calls.clear()
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            self._calls[frame.f_code] += 1

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """Stop, and write what was counted, to whoever reads the FIFO."""
        sys.setprofile(None)
        tally = StackTally()
        for code, count in self._calls.items():
            tally.add([self._names.name(code)], count)
        self._file.write_text(collapsed(tally), encoding="utf-8")


if __name__ == "__main__":
    counter = CallCounter(Path(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, counter.begin)
    signal.signal(signal.SIGUSR2, counter.end)
    end(router_main(serve))
