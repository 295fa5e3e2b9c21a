"""Serves step traces of a worker to the cluster's own processes; routers fetch them for operators."""

import asyncio
import gzip
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import torch
from torch.autograd.profiler import profile, record_function

from engine.types.request import Batch
from engine.types.runner import LaunchedStep, Runner
from tandem.config.telemetry import ProfilingConfig
from tandem.errors import Unavailable
from tandem.v1 import profiling_pb2 as pb
from tandem.v1.profiling_pb2_grpc import ProfilerServicer, add_ProfilerServicer_to_server
from worker.engine_host import EngineHost

_LEVEL = 3


class TracedRunner:
    """Labels every step in the trace, and calls `on_enough` after the last step wanted."""

    def __init__(self, runner: Runner, *, num_steps: int, on_enough: Callable[[], None]) -> None:
        """`on_enough` is called on the engine's thread."""
        self.runner = runner
        self.num_steps = 0
        self._wanted = num_steps
        self._on_enough = on_enough

    def bind_thread(self) -> None:
        """Do nothing: the runner is bound already."""

    def launch(self, batch: Batch, on_layers: Callable[[int], None] | None = None) -> LaunchedStep:
        self.num_steps += 1
        name = f"step {self.num_steps}: {len(batch.items)} requests, {batch.num_tokens} tokens"
        with record_function(name):
            step = self.runner.launch(batch, on_layers)
        if self.num_steps == self._wanted:
            self._on_enough()
        return step


class StepTrace:
    """A recording: `begin` and `end` run on the engine's thread between steps, then `write` on any."""

    def __init__(self) -> None:
        """The first one of a process takes seconds while the recorder starts: create it off the event loop."""
        with _recorder():
            pass
        self._recorder = _recorder()

    def begin(self) -> None:
        """Start recording, on the engine's thread."""
        self._recorder.__enter__()

    def end(self) -> None:
        self._recorder.__exit__(None, None, None)

    def write(self, path: Path) -> None:
        """Write Chrome's JSON format, compressed with gzip."""
        with tempfile.TemporaryDirectory(prefix="tandem-trace-") as folder:
            plain = Path(folder) / "trace.json"
            self._recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=_LEVEL) as packed:
                shutil.copyfileobj(source, packed)


def _recorder() -> Any:
    """The profiler that `torch.profiler` wraps, without importing torch's compilers."""
    return profile(use_cpu=True, use_device="cuda" if torch.cuda.is_available() else None)


async def trace_steps(host: EngineHost, trace: StepTrace, *, num_steps: int, timeout_s: float) -> int:
    """Record the next `num_steps` steps, or fewer if `timeout_s` ends first; returns the number recorded.

    Ends between two steps, also when cancelled.
    """
    loop, enough = asyncio.get_running_loop(), asyncio.Event()
    traced: list[TracedRunner] = []
    failed: list[Exception] = []

    def on_enough() -> None:
        loop.call_soon_threadsafe(enough.set)

    def begin(runner: Runner) -> Runner:
        try:
            trace.begin()
        except Exception as error:  # a broken recorder must not end the engine
            raise Unavailable(f"cannot start a trace: {error}") from error
        traced.append(TracedRunner(runner, num_steps=num_steps, on_enough=on_enough))
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
        # A cancelled `begin` may still run, so it is undone below.
        await host.replace_runner(begin)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await enough.wait()
    finally:
        await host.replace_runner(end)
    if failed:
        raise Unavailable(f"cannot stop the trace: {failed[0]}")
    return traced[0].num_steps


PART_BYTES = 1 << 20


class TraceService(ProfilerServicer):
    """The `Profiler` service: one trace at a time, within the configured bounds."""

    def __init__(self, host: EngineHost, bounds: ProfilingConfig) -> None:
        self._host, self._bounds = host, bounds
        self._is_busy = False

    async def Trace(self, request: pb.TraceRequest, context: Any) -> AsyncIterator[pb.TracePart]:
        """Stream one trace; aborts for bounds exceeded or while another trace is running."""
        bounds = self._bounds
        if not (1 <= request.num_steps <= bounds.max_steps and 0.0 < request.timeout_s <= bounds.max_seconds):
            most = f"at most {bounds.max_steps} steps and {bounds.max_seconds:g} s (profiling)"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, most)
        if self._is_busy:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another trace of this worker is under way")
        self._is_busy = True
        try:
            with tempfile.TemporaryDirectory(prefix="tandem-trace-") as folder:
                path = Path(folder) / "trace.json.gz"
                num_steps = await self._record(path, request)
                if path.stat().st_size > bounds.max_bytes:
                    too_large = (
                        f"the trace has more than {bounds.max_bytes} bytes (profiling.max_bytes): ask for fewer steps"
                    )
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, too_large)
                with path.open("rb") as file:
                    yield pb.TracePart(num_steps=num_steps, content=file.read(PART_BYTES))
                    while content := file.read(PART_BYTES):
                        yield pb.TracePart(content=content)
        finally:
            self._is_busy = False

    async def _record(self, path: Path, request: pb.TraceRequest) -> int:
        trace = await asyncio.to_thread(StepTrace)
        num_steps = await trace_steps(self._host, trace, num_steps=request.num_steps, timeout_s=request.timeout_s)
        await asyncio.to_thread(trace.write, path)
        return num_steps


def serve_traces(server: grpc.aio.Server, host: EngineHost, bounds: ProfilingConfig) -> None:
    """Add the service if profiling is enabled."""
    if bounds.enabled:
        add_ProfilerServicer_to_server(TraceService(host, bounds), server)  # type: ignore[no-untyped-call]
