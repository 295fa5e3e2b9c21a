"""Samples the stacks of this process's threads a hundred times a second, from a thread of its own."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

from tandem.profiling.stacks import MAX_DEPTH, StackTally

PERIOD_S = 0.01
_SWITCH_S = 1e-5
"""The interpreter's switch interval meanwhile. With Python's 5 ms the sampling thread would nearly always get its turn
where another thread waits or makes a system call, and such places would seem to take all of the time."""
_sampling = threading.Lock()
"""Held by the one that samples: a second one would take the short interval for the usual one."""
_ROOT = Path(__file__).parents[2]


class FrameNames:
    """Names of frames: function and file, `Dispatcher.run (router/dispatch/dispatcher.py)`. Each is made once."""

    def __init__(self) -> None:
        self._names: dict[CodeType, str] = {}

    def stack(self, frame: FrameType | None) -> list[str]:
        """Return a frame and its callers, outermost first; of deeper stacks the innermost MAX_DEPTH + 1."""
        frames: list[str] = []
        while frame is not None and len(frames) <= MAX_DEPTH:
            frames.append(self.name(frame.f_code))
            frame = frame.f_back
        return frames[::-1]

    def name(self, code: CodeType) -> str:
        """Return the name of a function's frames."""
        if (name := self._names.get(code)) is None:
            name = self._names[code] = f"{code.co_qualname} ({_shortened(code.co_filename)})"
        return name


class StackSampler:
    """One profile; `stop` ends it early. For the event loop's thread it includes the running task, by its coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, period_s: float = PERIOD_S) -> None:
        """Must be called on the loop's own thread."""
        self.tally = StackTally()
        self._loop, self._loop_thread, self._period_s = loop, threading.get_ident(), period_s
        self._names = FrameNames()
        self._stopped = threading.Event()

    def run(self, seconds: float) -> StackTally:
        """Sample for this long; blocks, so it needs a thread of its own."""
        with _sampling:
            usual_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
            try:
                self._sample_until(time.monotonic() + seconds)
            finally:
                sys.setswitchinterval(usual_s)
        return self.tally

    def stop(self) -> None:
        self._stopped.set()

    def _sample_until(self, ends_s: float) -> None:
        due_s = now_s = time.monotonic()
        while now_s < ends_s and not self._stopped.is_set():
            self._look()
            # A late sample does not bring the next ones closer together.
            due_s = max(due_s + self._period_s, time.monotonic())
            self._stopped.wait(min(due_s, ends_s) - time.monotonic())
            now_s = time.monotonic()

    def _look(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        task = self._task_name()
        for ident, frame in sys._current_frames().items():  # the documented way, and the only one
            if ident == threading.get_ident():
                continue
            of_loop = ident == self._loop_thread
            begin = ["event loop", *([task] if task else [])] if of_loop else [_bare(names.get(ident, "thread"))]
            self.tally.add([*begin, *self._names.stack(frame)])

    def _task_name(self) -> str | None:
        """The name of the running task's coroutine; tasks' own names may contain request ids."""
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:  # a Python that returns it on the loop's own thread only
            return None
        coroutine = task.get_coro() if task is not None else None
        return None if coroutine is None else f"task {getattr(coroutine, '__qualname__', type(coroutine).__name__)}"


def _shortened(filename: str) -> str:
    """The path from the package on: `router/http/app.py`, `starlette/requests.py`."""
    path = Path(filename)
    if path.is_relative_to(_ROOT) and "site-packages" not in path.parts[len(_ROOT.parts) :]:
        return str(path.relative_to(_ROOT))
    return "/".join(path.parts[-2:])


def _bare(name: str) -> str:
    """A thread's name without its number, so that the threads of a pool are counted together."""
    return name.rstrip("0123456789_-") or "thread"
