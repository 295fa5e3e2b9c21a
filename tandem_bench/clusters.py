"""Clusters for measurements, started through the command line on ports of their own and stopped afterwards.

`memory` is special: that transport joins two workers of one process, so `tandem_bench.memory_pair` runs both and only
the router has its own process.
"""

import asyncio
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import httpx
import psutil
import yaml

from tandem_bench.errors import CannotMeasure, ClusterFailed

COLOCATED = "colocated"
MEMORY = "memory"
_START_S = 120.0
_STOP_S = 60.0
_PERIOD_S = 0.02
_LAST_LINES = 80
_LAST_CHARS = 10_000
_PREFILL_IS_LIVE = re.compile(r'^tandem_workers\{role="prefill",state="live"\} [1-9]', re.MULTILINE)
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Kind of cluster: one decode worker and, unless `colocated`, one prefill worker; `more` can state more of them."""

    mode: str
    """`colocated`, or the name of a KV transport."""
    dtype: str = "float32"
    prefill_chunk_tokens: int = 512
    local_prefill_tokens: int | None = None
    """Value of `local_prefill_tokens`: None leaves the default; 0 sends every prompt through both pools."""
    num_threads: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further settings of the `model` section; the next fields are the same for other sections."""
    engine: Mapping[str, Any] = field(default_factory=dict, hash=False)
    router: Mapping[str, Any] = field(default_factory=dict, hash=False)
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Sections of the configuration that no other field sets."""

    @property
    def is_colocated(self) -> bool:
        """Whether a single worker does prefill and decode."""
        return self.mode == COLOCATED

    def config(self, ports: Sequence[int]) -> dict[str, Any]:
        """Return the content of the YAML; `ports`: HTTP, gRPC, prefill, decode."""
        router: dict[str, Any] = {"port": ports[0], "grpc_port": ports[1], **self.router}
        if self.local_prefill_tokens is not None:
            router |= dict.fromkeys(("local_prefill_tokens", "max_local_prefill_tokens"), self.local_prefill_tokens)
        engine: dict[str, Any] = {"prefill_chunk_tokens": self.prefill_chunk_tokens, "device": "cpu"}
        if self.num_threads is not None:
            engine["num_threads"] = self.num_threads
        model = {"dtype": self.dtype, **self.model}
        content: dict[str, Any] = {
            "standby_workers": 0,
            **self.more,
            "model": model,
            "engine": engine | dict(self.engine),
            "router": router,
        }
        if self.is_colocated:
            return content | {"prefill": {"replicas": 0}}
        if self.mode != MEMORY:
            content["transfer"] = {**self.more.get("transfer", {}), "transport": self.mode}
        else:
            content |= {
                "prefill": {"addresses": [f"127.0.0.1:{ports[2]}"]},
                "decode": {"addresses": [f"127.0.0.1:{ports[3]}"]},
                "secret": secrets.token_hex(16),
            }
        return content

    def commands(self, config: Path) -> list[list[str]]:
        """Return the processes to start, as arguments of `python -m`."""
        if self.mode == MEMORY:
            return [
                ["tandem_bench.memory_pair", "--config", str(config)],
                ["cluster.cli.main", "router", "--config", str(config)],
            ]
        return [["cluster.cli.main", "up", "--config", str(config)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Cluster that serves, with its address and its start-up time."""

    url: str
    started_s: float
    """Time of starting its first process, on time.monotonic."""
    ready_s: float
    """Time from then until `/readyz` returned 200."""
    pids: tuple[int, ...]
    """Process ids of the started processes, which have children."""
    log: Path
    """Output of all its processes; deleted with the cluster."""

    def pid_of(self, name: str) -> int:
        """Return the process id of a process by its `process_name`. Raises CannotMeasure when there is none."""
        for parent in self.pids:
            for process in psutil.Process(parent).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if process_name(process.cmdline()) == name:
                        return process.pid
        raise CannotMeasure(f"there is no {name}")


def process_name(command: Sequence[str]) -> str | None:
    """Return module and index of a cluster's process, such as `decode_worker 0`, by its arguments; None for others."""
    if command[1:2] != ["-m"] or len(command) < 3:
        return None
    module = command[2]
    if module == "cluster.cli.main":
        return "tandem up"
    index = command[command.index("--index") + 1] if "--index" in command else "0"
    return f"{module} {index}"


def last_words(log: Path) -> str:
    """Return the end of a log: enough to understand a failure from it alone."""
    text = log.read_text(encoding="utf-8", errors="replace")[-_LAST_CHARS:]
    return "\n".join(text.splitlines()[-_LAST_LINES:])


@asynccontextmanager
async def running(setup: Setup, *, patience_s: float = _START_S) -> AsyncIterator[RunningCluster]:
    """Run a cluster within the context. Raises ClusterFailed, also when it does not serve within `patience_s`."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        ports = free_ports(4)
        config = folder / "cluster.yaml"
        config.touch(mode=0o600)
        config.write_text(yaml.safe_dump(setup.config(ports)), encoding="utf-8")
        log = stack.enter_context((folder / "log").open("w", encoding="utf-8"))
        started_s = time.monotonic()
        processes = []
        for command in setup.commands(config):
            process = await _start(command, log)
            stack.push_async_callback(_stop, process)
            processes.append(process)
        url = f"http://127.0.0.1:{ports[0]}"
        try:
            await _until(url, _is_ready, processes, started_s + patience_s)
            ready_s = time.monotonic() - started_s
            if not setup.is_colocated:
                # A router is ready once it has a decode worker; its session with the prefill worker may start later.
                await _until(url, _has_prefill_worker, processes, started_s + patience_s)
        except ClusterFailed as error:
            raise ClusterFailed(f"{error}\n{last_words(Path(log.name))}") from None
        yield RunningCluster(
            url=url,
            started_s=started_s,
            ready_s=ready_s,
            pids=tuple(process.pid for process in processes),
            log=Path(log.name),
        )


def free_ports(count: int) -> list[int]:
    """Choose unused ports of the loopback interface.

    They are outside the range for outgoing connections, which could otherwise take a port before its cluster does.
    """
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = _PORTS.start + secrets.randbelow(len(_PORTS))
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found


async def _start(command: Sequence[str], log: IO[str]) -> asyncio.subprocess.Process:
    # A user's TANDEM_* settings would override the YAML and change what is measured.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _until(
    url: str,
    holds: Callable[[httpx.AsyncClient], Awaitable[bool]],
    processes: Sequence[asyncio.subprocess.Process],
    deadline_s: float,
) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while not await _holds(holds, http):
            dead = [process for process in processes if process.returncode is not None]
            if dead or time.monotonic() > deadline_s:
                raise ClusterFailed(f"exit code {dead[0].returncode}" if dead else "not ready")
            # The server runs in another process, which gives no event to wait for.
            await asyncio.sleep(_PERIOD_S)


async def _holds(holds: Callable[[httpx.AsyncClient], Awaitable[bool]], http: httpx.AsyncClient) -> bool:
    try:
        return await holds(http)
    except httpx.TransportError:
        return False


async def _is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readyz")).status_code == httpx.codes.OK


async def _has_prefill_worker(http: httpx.AsyncClient) -> bool:
    return _PREFILL_IS_LIVE.search((await http.get("/metrics")).text) is not None
