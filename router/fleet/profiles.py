"""Profiles for operators: a flame graph of this router, a trace of a worker. One runs at a time."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from router.types.worker_view import WorkerKey
from tandem.config.telemetry import ProfilingConfig
from tandem.errors import InvalidRequest, Overloaded, ServingError, Unavailable
from tandem.profiling.sampler import StackSampler
from tandem.profiling.stacks import StackTally
from tandem.rpc.cluster_grpc import ChannelOpener
from tandem.v1 import profiling_pb2 as pb
from tandem.v1.profiling_pb2_grpc import ProfilerStub

PREPARE_S = 120.0
"""Time for a worker's profiler to start, and for the trace to be written and sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    content: bytes
    """Chrome trace JSON, compressed with gzip."""
    num_steps: int


class Profiles:
    """Takes profiles of one router process and of its workers."""

    def __init__(
        self,
        bounds: ProfilingConfig,
        addresses: Callable[[], Mapping[WorkerKey, str]],
        metadata: Sequence[tuple[str, str]],
        open_channel: ChannelOpener,
    ) -> None:
        """`metadata`: authenticates the router to workers."""
        self.bounds = bounds
        self._addresses = addresses
        self._metadata = metadata
        self._open_channel = open_channel
        self._is_busy = False

    async def of_router(self, seconds: float) -> StackTally:
        """Sample this process's stacks for `seconds`. Raises Overloaded, InvalidRequest."""
        self._check_seconds(seconds)
        with self._alone():
            sampler = StackSampler(asyncio.get_running_loop())
            try:
                return await asyncio.to_thread(sampler.run, seconds)
            finally:
                sampler.stop()  # the caller may have been cancelled

    async def of_worker(self, worker_id: str, *, num_steps: int, seconds: float) -> WorkerTrace:
        """Trace a worker's next steps, for at most `seconds`. Raises Overloaded, InvalidRequest, Unavailable."""
        self._check_seconds(seconds)
        if not 1 <= num_steps <= self.bounds.max_steps:
            raise InvalidRequest(f"steps must be in [1, {self.bounds.max_steps}] (profiling.max_steps)", param="steps")
        known = {key.worker_id: address for key, address in self._addresses().items()}
        address = known.get(worker_id)  # type: ignore[call-overload]  # whatever a client calls it
        if address is None:
            shown = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(f"worker: no such worker; live workers: {shown}", param="worker")
        with self._alone():
            return await self._fetch(address, pb.TraceRequest(num_steps=num_steps, timeout_s=seconds))

    async def _fetch(self, address: str, request: pb.TraceRequest) -> WorkerTrace:
        content, num_steps = bytearray(), 0
        try:
            async with self._open_channel(address) as channel:
                stub = ProfilerStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Trace(request, metadata=self._metadata, timeout=request.timeout_s + PREPARE_S)
                async for part in call:
                    num_steps = num_steps or part.num_steps
                    content += part.content
                    if len(content) > self.bounds.max_bytes:
                        raise Unavailable("the worker's trace exceeds profiling.max_bytes")
        except grpc.RpcError as error:
            raise _refusal(error) from None
        return WorkerTrace(content=bytes(content), num_steps=num_steps)

    def _check_seconds(self, seconds: float) -> None:
        if not 0.0 < seconds <= self.bounds.max_seconds:
            most = f"seconds must be above 0 and at most {self.bounds.max_seconds:g} (profiling.max_seconds)"
            raise InvalidRequest(most, param="seconds")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_busy:
            raise Overloaded("another profile is under way", retry_after_s=1.0)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def _refusal(error: grpc.RpcError) -> ServingError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, retry_after_s=1.0)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable("the worker does not serve traces: profiling.enabled is off there")
    return Unavailable(f"no trace: {code.name}: {details}")
