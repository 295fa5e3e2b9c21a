"""Serves a worker's traces at its port, to the cluster's own processes; routers fetch them for operators."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tandem.config.telemetry import ProfilingConfig
from tandem.v1 import profiling_pb2 as pb
from tandem.v1.profiling_pb2_grpc import ProfilerServicer, add_ProfilerServicer_to_server
from worker.engine_host import EngineHost
from worker.step_trace import StepTrace, trace_steps

PART_BYTES = 1 << 20


class TraceService(ProfilerServicer):
    """The `Profiler` service: one trace at a time, within the configured bounds."""

    def __init__(self, host: EngineHost, bounds: ProfilingConfig) -> None:
        self._host, self._bounds = host, bounds
        self._is_busy = False

    async def Trace(self, request: pb.TraceRequest, context: Any) -> AsyncIterator[pb.TracePart]:
        """Aborts with what is wrong."""
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
    """Add the service, where it is turned on."""
    if bounds.enabled:
        add_ProfilerServicer_to_server(TraceService(host, bounds), server)  # type: ignore[no-untyped-call]
