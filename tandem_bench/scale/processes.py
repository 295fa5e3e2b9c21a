"""The processes of `python -m tandem_bench scale`: routers that share a port, hosts of many workers, clients."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from router.text.tokenizer import Tokenizer
from tandem.model_path import model_directory
from tandem_bench.clusters import free_ports, process_name
from tandem_bench.errors import CannotMeasure

STEP_S = 1.0
"""Time of a token of every stream."""
LOOK_S = 0.5
_DRAIN_S = 5.0
"""How long leaving workers let their requests run; the rest go on elsewhere."""
_START_S = 300.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class ReportingProcess:
    """A process that prints how things stand, as a line of JSON each second."""

    process: asyncio.subprocess.Process
    reading: "asyncio.Task[None]"
    """Ends with the process."""
    last: dict[str, Any]

    def check(self) -> None:
        """Raise CannotMeasure when it has ended: what it said last would count for ever."""
        if self.reading.done():
            raise CannotMeasure(f"a process of this measurement has ended with {self.process.returncode}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Raises CannotMeasure when it has ended."""
        self.check()
        self.process.send_signal(number)


async def start(stack: AsyncExitStack, log: IO[str], *command: str) -> ReportingProcess:
    """Start a reporting process, which is killed with the stack."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE, stderr=log
    )
    last: dict[str, Any] = {}

    async def read() -> None:
        assert process.stdout is not None  # narrows: it is a pipe
        while line := await process.stdout.readline():
            last.update(json.loads(line))
        await process.wait()

    async def stop() -> None:
        if process.returncode is None:
            process.kill()
        await reading

    reading = asyncio.create_task(read())
    stack.push_async_callback(stop)
    return ReportingProcess(process, reading, last)


class Workers:
    """All processes of workers. Each hosts as many as a storm has."""

    def __init__(
        self,
        stack: AsyncExitStack,
        log: IO[str],
        *,
        each: int,
        redis_port: int,
        secret: str,
        says: Sequence[int],
    ) -> None:
        self._stack = stack
        self._log = log
        self.each = each
        self._arguments = ["--redis-port", str(redis_port), "--secret", secret, "--step-s", str(STEP_S)]
        vocabulary = Tokenizer.load(model_directory("builtin")).size
        self._arguments += ["--vocab-size", str(vocabulary), "--drain-s", str(_DRAIN_S), "--says", *map(str, says)]
        self._hosts: list[ReportingProcess] = []
        self._num_started = 0

    async def join(self) -> None:
        """Start one more process of workers."""
        place = ["--first", str(self._num_started), "--count", str(self.each)]
        self._num_started += self.each
        command = ["tandem_bench.scale.mock_workers", *place, *self._arguments]
        self._hosts.append(await start(self._stack, self._log, *command))

    async def crash(self) -> None:
        """Kill the process that is oldest."""
        self._hosts.pop(0).send(signal.SIGKILL)

    async def leave(self) -> None:
        """Have the workers of the oldest process leave."""
        self._hosts.pop(0).send(signal.SIGTERM)

    def num_sessions(self) -> int:
        """Return the sessions of all workers that are to stay. Raises CannotMeasure when a process has ended."""
        for host in self._hosts:
            host.check()
        return sum(host.last.get("sessions", 0) for host in self._hosts)


@asynccontextmanager
async def routers(
    count: int, redis_port: int, secret: str, folder: Path, log: IO[str]
) -> AsyncIterator[tuple[int, list[int]]]:
    """Run router processes that share a port; yields the port, and their process ids."""
    port, grpc_port = free_ports(2)
    config = {
        "secret": secret,
        "log_level": "warning",
        "redis": {"url": f"redis://127.0.0.1:{redis_port}/0"},
        "router": {"port": port, "grpc_port": grpc_port, "processes": count, "max_inflight_requests": 1 << 14},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 1},
    }
    file = folder / "cluster.yaml"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "cluster.cli.main", "router", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield port, await _router_pids(process, count)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _router_pids(process: asyncio.subprocess.Process, count: int) -> list[int]:
    """Return the process ids of all routers. Raises CannotMeasure when they do not start."""

    def find() -> list[int]:
        if process.returncode is not None:
            raise CannotMeasure(f"the routers ended with {process.returncode}")
        try:
            first = psutil.Process(process.pid)  # which becomes the router if there is one
            found = [(one.pid, one.cmdline()) for one in (first, *first.children(recursive=True))]
        except psutil.Error:
            return []  # one of them has just ended
        return [pid for pid, command in found if (process_name(command) or "").startswith("router ")]

    await until(lambda: len(find()) == count, "all routers run")
    return find()


async def until(holds: Callable[[], bool], what: str, patience_s: float = _START_S) -> float:
    """Wait until it holds; return after how many seconds. Raises CannotMeasure when it takes too long."""
    begun_s = time.monotonic()
    while not holds():
        if time.monotonic() - begun_s > patience_s:
            raise CannotMeasure(f"{patience_s:g} s are not enough until {what}")
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - begun_s
