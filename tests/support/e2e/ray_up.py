"""A `tandem up --ray` as tests see it: its output, its endpoints, and what becomes of streams when a node is lost."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx

from cluster.processes.effective_config import PortDrawer
from tests.support.e2e.ray_nodes import RayNodes
from tests.support.running_cluster import WAIT_S, Logs, RunningCluster, Streamed

ROOT = Path(__file__).parents[3]
START_S = 180.0
"""For processes to start, however busy the machine is."""
STREAMS, ANSWER = 16, 500
BEGUN = 12
"""Tokens of every stream before anything is done to a node."""
SHORT = 24
"""Tokens of each answer of the clients that send requests all the while."""
SECRET = "the-secret-of-this-cluster"
_TIMED_IMPORTS = """
import time
began_s, worked_s = time.monotonic(), time.process_time()
import decode_worker.worker
print((time.monotonic() - began_s) / (time.process_time() - worked_s))
"""

Answers = tuple[list[list[int]], list[list[int]]]
"""Prompts, and what `transformers` says to them."""


class Upped:
    """A `tandem up` that runs, and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, environment: dict[str, str]) -> None:
        self.process = process
        self.port = port
        self.environment = environment
        self.logs = Logs()
        self._said = asyncio.Condition()

    async def listen(self) -> None:
        """Collect the lines of its output until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.logs.lines.append(line.decode(errors="replace").rstrip())
            async with self._said:
                self._said.notify_all()

    async def says(self, *parts: str, since: int = 0) -> None:
        """Wait for a line with all of these."""

        def is_printed() -> bool:
            return any(all(part in line for part in parts) for line in self.logs.lines[since:])

        try:
            async with asyncio.timeout(START_S), self._said:
                await self._said.wait_for(is_printed)
        except TimeoutError:
            raise AssertionError(f"never said {parts}:\n" + "\n".join(self.logs.lines[-40:])) from None

    async def order(self, *words: str) -> None:
        """A change, as a user asks for it; to its end."""
        ordering = await tandem(self.environment, *words, "--port", str(self.port))
        out, _ = await ordering.communicate()
        assert ordering.returncode == 0, (out.decode(), *self.logs.lines[-40:])


async def tandem(environment: dict[str, str], *arguments: str) -> asyncio.subprocess.Process:
    """A `tandem` command, both its outputs in one."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cluster.cli.main", *arguments),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def measure_slowdown() -> float:
    """Import what a worker imports, in a process of its own; its time divided by its processor time, at least 1.

    A bound in seconds, multiplied by this, holds on a machine on which other things run as well.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TIMED_IMPORTS, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return max(1.0, float(out))


@asynccontextmanager
async def running_on(nodes: RayNodes, folder: Path) -> AsyncIterator[Upped]:
    """One prefill and two decode workers; ends by Ctrl-C."""
    own = {"XDG_RUNTIME_DIR": str(folder), "TANDEM_ENGINE__NUM_THREADS": "1", "TANDEM_SECRET": SECRET}
    environment = nodes.environment | own
    with PortDrawer() as ports:
        port, grpc_port = (ports.draw("127.0.0.1", "a test") for _ in range(2))
    sizes = ("--prefill", "1", "--decode", "2", "--port", str(port), "--grpc-port", str(grpc_port))
    process = await tandem(environment, "up", "--ray", nodes.address, *sizes)
    made = Upped(process, port, environment)
    listening = asyncio.ensure_future(made.listen())
    try:
        await made.says("Try it:")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            await listening
        assert await process.wait() == 0, made.logs.lines[-40:]


@asynccontextmanager
async def endpoints_of(upped: Upped) -> AsyncIterator[RunningCluster]:
    """Yield the cluster behind its HTTP endpoint, once all three workers take part."""
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{upped.port}"
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits, trust_env=False) as http:
        made = RunningCluster(None, http, upped.logs)  # type: ignore[arg-type]
        await made.until_workers(3)
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What a node's loss came to."""

    names: Sequence[str]
    """Of the workers that ran there."""
    longest_pause_s: float
    """Between two words of any stream."""
    replaced_s: float
    """From the loss until every one of them served elsewhere."""
    slowdown: float
    """How much longer than its processor time a process took that was started at the loss: what else ran here."""

    def __str__(self) -> str:
        return (
            f"{STREAMS} streams, 0 lost, longest pause {self.longest_pause_s:.2f} s; "
            f"{', '.join(self.names)} replaced in {self.replaced_s:.1f} s, {self.slowdown:.1f} s for a second's work"
        )


class _Pauses:
    """How long clients waited between two words, and whether all have had some."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.all_begun = asyncio.Event()
        self._begun: set[int] = set()
        self._last: dict[int, float] = {}

    def heard(self, stream: Streamed) -> None:
        now = monotonic()
        self.longest_s = max(self.longest_s, now - self._last.get(id(stream), now))
        self._last[id(stream)] = now
        if len(stream.token_ids) >= BEGUN:
            self._begun.add(id(stream))
        if len(self._begun) == STREAMS:
            self.all_begun.set()


async def lose_a_node(
    lose: Callable[[], Awaitable[list[str]]], upped: Upped, cluster: RunningCluster, answers: Answers
) -> Lost:
    """Do it under streams, none of which is lost or says anything else than it would have; `lose`: who ran there."""
    prompts, expected = answers
    pauses = _Pauses()
    streams = [asyncio.ensure_future(cluster.stream(prompt, ANSWER, on_token=pauses.heard)) for prompt in prompts]
    async with asyncio.timeout(WAIT_S):
        await pauses.all_begun.wait()
    since = len(upped.logs.lines)
    names, lost_s = await lose(), monotonic()
    measuring = asyncio.ensure_future(measure_slowdown())
    assert any(name.startswith("decode") for name in names)
    assert not all(stream.done() for stream in streams)
    results = await asyncio.gather(*streams)
    assert [one.token_ids for one in results] == expected
    assert await cluster.figure("tandem_dispatch_retries_total") > 0, "the streams of that node went on elsewhere"
    for name in names:
        await upped.says(name, "lost together with its node", since=since)
        await upped.says(name, "is back", since=since)
    replaced_s = monotonic() - lost_s
    await cluster.until_workers(3)
    return Lost(names=names, longest_pause_s=pauses.longest_s, replaced_s=replaced_s, slowdown=await measuring)


async def assert_same_tokens(cluster: RunningCluster, answers: Answers, salt: str) -> None:
    """Every prompt anew, past the caches."""
    prompts, expected = answers
    results = await asyncio.gather(*(cluster.tokens(prompt, SHORT, cache_salt=salt) for prompt in prompts))
    assert results == [one[:SHORT] for one in expected]


@asynccontextmanager
async def continuous_requests(cluster: RunningCluster, answers: Answers, clients: int) -> AsyncIterator[None]:
    """Clients who ask for the next answer as soon as they have one; each answer is what it should be."""
    prompts, expected = answers
    enough, num_answers = asyncio.Event(), 0

    async def ask(number: int) -> None:
        nonlocal num_answers
        while not enough.is_set():
            got = await cluster.stream(prompts[number], SHORT, cache_salt=f"{number} {num_answers}")
            assert got.token_ids == expected[number][:SHORT]
            num_answers += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(ask(number))
        yield
        enough.set()
    assert num_answers >= clients
    assert await cluster.figure("tandem_request_failures_total") == 0
