"""All of `python -m tandem_bench scale`: a thousand workers and thousands of live streams on one machine.

Redis, several router processes, and decode workers without engines: what they say to each other is all real. While
the streams run, a hundred workers crash at once, a hundred come, a hundred leave, and then all three at the same time.
Every stream must end with exactly the text that an undisturbed one has, or say why it does not.
"""

import argparse
import asyncio
import json
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil
import yaml
from rich.console import Console

from router.text.tokenizer import Tokenizer
from tandem.model_path import model_directory
from tandem_bench.clusters import free_ports, last_words, process_name
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure, print_table
from tandem_bench.router.redis import RedisServer
from tandem_bench.scale.streams import HUNG_S

STEP_S = 1.0
"""Time of a token of every stream."""
_STORY = "Once upon a time there was a little girl who had a red ball and a big dog. "
_DRAIN_S = 5.0
"""How long leaving workers let their requests run; the rest go on elsewhere."""
_START_S = 300.0
_STREAMS_PER_CLIENT = 1250
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class ReportingProcess:
    """A process that prints how things stand, as a line of JSON each second."""

    process: asyncio.subprocess.Process
    reading: "asyncio.Task[None]"
    """Ends with the process."""
    last: dict[str, Any]

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process.returncode is None:
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

    async def stop() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()
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
        self.hosts: list[ReportingProcess] = []
        self.num_started = 0

    async def join(self) -> None:
        """Start one more process of workers."""
        place = ["--first", str(self.num_started), "--count", str(self.each)]
        self.num_started += self.each
        command = ["tandem_bench.scale.mock_workers", *place, *self._arguments]
        self.hosts.append(await start(self._stack, self._log, *command))

    async def crash(self) -> None:
        """Kill the process that is oldest."""
        self.hosts.pop(0).send(signal.SIGKILL)

    async def leave(self) -> None:
        """Have the workers of the oldest process leave."""
        self.hosts.pop(0).send(signal.SIGTERM)

    def total(self, what: str) -> int:
        return sum(host.last.get(what, 0) for host in self.hosts)


@asynccontextmanager
async def _routers(
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
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _router_pids(process: asyncio.subprocess.Process, count: int) -> list[int]:
    """Return the process ids of all routers. Raises CannotMeasure when they do not start."""

    def find() -> list[int]:
        if process.returncode is not None:
            raise CannotMeasure(f"the routers ended with {process.returncode}")
        first = psutil.Process(process.pid)  # which becomes the router if there is one
        return [
            one.pid
            for one in (first, *first.children(recursive=True))
            if (process_name(one.cmdline()) or "").startswith("router ")
        ]

    await _until(lambda: len(find()) == count, "all routers run")
    return find()


async def _until(holds: Callable[[], bool], what: str, patience_s: float = _START_S) -> float:
    """Wait until it holds; return after how many seconds. Raises CannotMeasure when it takes too long."""
    begun_s = time.monotonic()
    while not holds():
        if time.monotonic() - begun_s > patience_s:
            raise CannotMeasure(f"{patience_s:g} s are not enough until {what}")
        await asyncio.sleep(_LOOK_S)
    return time.monotonic() - begun_s


class Measurement:
    """One run."""

    def __init__(
        self, options: argparse.Namespace, workers: Workers, routers: Sequence[int], rows: list[Row], err: Console
    ) -> None:
        """`rows`: get the figures."""
        self._options = options
        self._workers = workers
        self._routers = [psutil.Process(pid) for pid in routers]
        self._err = err
        self._clients: list[ReportingProcess] = []
        self.fewest_live = options.streams
        """Live streams, at their fewest since all had begun."""
        self.rows = rows

    def _live(self) -> int:
        return sum(client.last.get("live", 0) for client in self._clients)

    def note(self, text: str) -> None:
        self._err.print(f"[dim]{text}[/dim]", soft_wrap=True)

    async def open_sessions(self) -> None:
        """Start the workers, and wait until every router has a session with each."""
        for _ in range(self._options.workers // self._workers.each):
            await self._workers.join()
        took_s = await self._all_sessions()
        self.rows.append(figure("sessions of workers with routers", self._workers.total("sessions"), ""))
        self.note(f"{self._workers.total('sessions')} sessions after {took_s:.1f} s")

    async def _all_sessions(self) -> float:
        wanted = self._options.workers * len(self._routers)
        return await _until(lambda: self._workers.total("sessions") == wanted, f"there are {wanted} sessions")

    async def begin_streams(self, stack: AsyncExitStack, log: IO[str], port: int, texts: Sequence[str]) -> None:
        """Start the clients, and wait until all streams are live."""
        num_clients = -(-self._options.streams // _STREAMS_PER_CLIENT)
        for index in range(num_clients):
            count = self._options.streams // num_clients + (index < self._options.streams % num_clients)
            arguments = ["--port", str(port), "--streams", str(count), "--tokens", str(self._options.tokens)]
            arguments += ["--texts", json.dumps(texts), "--seed", str(self._options.seed + index)]
            self._clients.append(await start(stack, log, "tandem_bench.scale.streams", *arguments))
        # Between two streams of a connection there is a moment without one.
        wanted = 0.98 * self._options.streams
        took_s = await _until(lambda: self._live() >= wanted, f"{wanted:.0f} streams are live")
        self.note(f"{self._live()} live streams after {took_s:.1f} s")

    async def storms(self) -> None:
        """Have each kind of storm, then all at once; measure how long until all sessions are there again."""
        workers = self._workers
        await self._steady()
        for name, storm in (("crash", (workers.crash, workers.join)), ("leave", (workers.leave, workers.join))):
            await self._storm(f"{workers.each} {name}, as many join", *storm)
        await self._storm("all at once", workers.crash, workers.leave, workers.join, workers.join)
        await self._steady()

    async def _storm(self, name: str, *deeds: Callable[[], Any]) -> None:
        self.note(f"{name}: {self._live()} live streams")
        for deed in deeds:
            await deed()
        took_s = await self._all_sessions()
        self.rows.append(figure(f"{name}: until all routers know all workers", took_s, "s"))
        await self._steady()

    async def _steady(self) -> None:
        """Let things run, and count what they cost."""
        before_s = self._routers_cpu_s()
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < self._options.seconds:
            await asyncio.sleep(_LOOK_S)
            self.fewest_live = min(self.fewest_live, self._live())
        took_s = time.monotonic() - begun_s
        shares = [(b - a) / took_s for a, b in zip(before_s, self._routers_cpu_s(), strict=True)]
        self.note(f"{self._live()} live streams; processor time of routers {', '.join(f'{s:.0%}' for s in shares)}")

    def _routers_cpu_s(self) -> list[float]:
        """Return the processor time of each router. Raises CannotMeasure when one has ended."""
        try:
            return [sum(process.cpu_times()[:2]) for process in self._routers]
        except psutil.NoSuchProcess as error:
            raise CannotMeasure(f"a router has ended: {error}") from None

    async def end_streams(self) -> None:
        """Begin no more streams, wait for all, and add what became of them."""
        for client in self._clients:
            client.send(signal.SIGTERM)
        patience_s = 2 * self._options.tokens * STEP_S + 2 * HUNG_S
        await _until(
            lambda: all(client.reading.done() for client in self._clients), "all streams have ended", patience_s
        )
        ended: Counter[str] = Counter()
        for client in self._clients:
            ended.update(client.last["ended"])
        whole, wrong, hung = (ended.pop(how, 0) for how in ("whole", "wrong text", "hung"))
        silent = sum(count for how, count in ended.items() if how.startswith("broken off"))
        self.rows += [
            figure("live streams, at the fewest", self.fewest_live, ""),
            figure("streams ended with exactly their text", whole, ""),
            figure("streams with another text", wrong, "", at_most=0),
            figure(f"streams that hung for {HUNG_S:g} s", hung, "", at_most=0),
            figure("streams that ended without a reason", silent, "", at_most=0),
            figure("streams that ended and said why", ended.total() - silent, ""),
            *(figure(f"longest pause of a stream: {name}", self._pause_s(share), "s") for name, share in _SHARES),
            *(figure("memory of a router", one.memory_info().rss / (1 << 20), "MB") for one in self._routers),
        ]
        for how, count in ended.most_common():
            self.note(f"{count} streams: {how}")

    def _pause_s(self, share: str) -> float:
        """Return the greatest of the clients' quantiles: at least that of all of them together."""
        return max(float(client.last["pauses_s"].get(share, 0.0)) for client in self._clients)


_SHARES = (("p50", "0.5"), ("p99", "0.99"), ("greatest", "1.0"))


def _texts_of(says: Sequence[int]) -> list[str]:
    """Return the text of each token where it stands."""
    tokenizer = Tokenizer.load(model_directory("builtin"))
    stream = tokenizer.detokenizer()
    texts = [stream.push(token_id) for token_id in says]
    if not all(texts) or "".join(texts) != tokenizer.decode(says):
        raise CannotMeasure("a token of the answer has no text of its own")
    return texts


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows`. Raises CannotMeasure."""
    if options.workers % options.storm or options.workers < 3 * options.storm:
        raise CannotMeasure("--workers must be a multiple of --storm, and at least three times as many")
    says = Tokenizer.load(model_directory("builtin")).encode(_STORY, add_special_tokens=False)
    secret, redis = secrets.token_hex(16), RedisServer()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.kill)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-scale-")))
        log = stack.enter_context((folder / "log").open("w"))
        try:
            started = _routers(options.routers, redis.port, secret, folder, log)
            port, routers = await stack.enter_async_context(started)
            each = {"each": options.storm, "redis_port": redis.port, "secret": secret, "says": says}
            run = Measurement(options, Workers(stack, log, **each), routers, rows, err)
            await run.open_sessions()
            await run.begin_streams(stack, log, port, _texts_of(says))
            await run.storms()
            await run.end_streams()
        except CannotMeasure as error:
            raise CannotMeasure(f"{error}\n{last_words(folder / 'log')}") from None
    print_table(out, rows)
