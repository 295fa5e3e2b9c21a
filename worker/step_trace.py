"""A trace of an engine's next steps by torch's own profiler: operators, kernels, and the steps they belong to.

Torch records the thread that asks for it, so all but writing the file is done on the engine's. A trace tells names,
counts and times: neither shapes nor stacks nor contents. Of a model on several ranks it shows the first.
"""

import asyncio
import gzip
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from engine.types.request import Batch
from engine.types.runner import LaunchedStep, Runner
from tandem.errors import Unavailable
from worker.engine_host import EngineHost

_LEVEL = 3


class TracedRunner:
    """Gives every step a name in the trace, and says when there were enough of them."""

    def __init__(self, runner: Runner, *, num_steps: int, on_enough: Callable[[], None]) -> None:
        """`on_enough` runs on the engine's thread."""
        self.runner = runner
        self.num_steps = 0
        self._wanted = num_steps
        self._on_enough = on_enough

    def bind_thread(self) -> None:
        """The runner is bound already."""

    def launch(self, batch: Batch, on_layers: Callable[[int], None] | None = None) -> LaunchedStep:
        """As the runner does it."""
        self.num_steps += 1
        name = f"step {self.num_steps}: {len(batch.items)} requests, {batch.num_tokens} tokens"
        with record_function(name):
            step = self.runner.launch(batch, on_layers)
        if self.num_steps == self._wanted:
            self._on_enough()
        return step


class StepTrace:
    """From `begin` to `end` on the engine's thread, between two steps each; then `write` on any."""

    def __init__(self) -> None:
        """The first one of a process takes its time, for the recorder's own start: make it where nobody waits."""
        with _recorder():
            pass
        self._recorder = _recorder()

    def begin(self) -> None:
        """Record from now on."""
        self._recorder.__enter__()

    def end(self) -> None:
        """Record no more."""
        self._recorder.__exit__(None, None, None)

    def write(self, path: Path) -> None:
        """Chrome's JSON, in gzip."""
        with tempfile.TemporaryDirectory(prefix="tandem-trace-") as folder:
            plain = Path(folder) / "trace.json"
            self._recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=_LEVEL) as packed:
                shutil.copyfileobj(source, packed)


def _recorder() -> Any:
    """What `torch.profiler` stands on; that one would first import all of torch's compilers."""
    return profile(use_cpu=True, use_device="cuda" if torch.cuda.is_available() else None)


async def trace_steps(host: EngineHost, trace: StepTrace, *, num_steps: int, timeout_s: float) -> int:
    """Record the next steps, or those of the next seconds where there are fewer; returns how many the trace has.

    Ends between two steps, also when nobody waits for it any more.
    """
    loop, enough = asyncio.get_running_loop(), asyncio.Event()
    traced: list[TracedRunner] = []
    failed: list[Exception] = []

    def tell() -> None:
        loop.call_soon_threadsafe(enough.set)

    def begin(runner: Runner) -> Runner:
        try:
            trace.begin()
        except Exception as error:  # the recorder's trouble is not the engine's
            raise Unavailable(f"no trace can be made now: {error}") from error
        traced.append(TracedRunner(runner, num_steps=num_steps, on_enough=tell))
        return traced[0]

    def end(runner: Runner) -> Runner:
        if not traced:
            return runner
        try:
            trace.end()
        except Exception as error:  # noqa: BLE001  # as above
            failed.append(error)
        return traced[0].runner if runner is traced[0] else runner

    try:
        # Also when nobody waits for it any more it happens, so it is undone below.
        await host.replace_runner(begin)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await enough.wait()
    finally:
        await host.replace_runner(end)
    if failed:
        raise Unavailable(f"the trace could not be ended: {failed[0]}")
    return traced[0].num_steps
