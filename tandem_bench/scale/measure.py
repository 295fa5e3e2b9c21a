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
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil
from rich.console import Console

from router.text.tokenizer import Tokenizer
from tandem.model_path import model_directory
from tandem_bench.clusters import last_words
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure, print_table
from tandem_bench.router.redis import RedisServer
from tandem_bench.scale.processes import LOOK_S, STEP_S, ReportingProcess, Workers, routers, start, until
from tandem_bench.scale.streams import HUNG_S, SHARES

_STORY = "Once upon a time there was a little girl who had a red ball and a big dog. "
_STREAMS_PER_CLIENT = 1250
_UNTOLD = ("broken off", "no connection")
"""How streams end that nobody gave a reason for, by their first words."""


class Measurement:
    """One run."""

    def __init__(
        self, options: argparse.Namespace, workers: Workers, router_pids: Sequence[int], rows: list[Row], err: Console
    ) -> None:
        """`rows`: get the figures."""
        self._options = options
        self._workers = workers
        self._routers = [psutil.Process(pid) for pid in router_pids]
        self._rows = rows
        self._err = err
        self._clients: list[ReportingProcess] = []
        self._fewest_live = options.streams

    def note(self, text: str) -> None:
        self._err.print(f"[dim]{text}[/dim]", soft_wrap=True)

    async def open_sessions(self) -> None:
        """Start the workers, and wait until every router has a session with each."""
        for _ in range(self._options.workers // self._workers.each):
            await self._workers.join()
        took_s = await until(self._has_all_sessions, "all sessions are open")
        self._rows.append(figure("sessions of workers with routers", self._workers.num_sessions(), ""))
        self.note(f"{self._workers.num_sessions()} sessions after {took_s:.1f} s")

    def _has_all_sessions(self) -> bool:
        self._look()
        wanted: int = self._options.workers * len(self._routers)
        return self._workers.num_sessions() == wanted

    async def begin_streams(self, stack: AsyncExitStack, log: IO[str], port: int, texts: Sequence[str]) -> None:
        """Start the clients, and wait until all streams are live."""
        clients: list[ReportingProcess] = []
        num_clients = -(-self._options.streams // _STREAMS_PER_CLIENT)
        for index in range(num_clients):
            count = self._options.streams // num_clients + (index < self._options.streams % num_clients)
            arguments = ["--port", str(port), "--streams", str(count), "--tokens", str(self._options.tokens)]
            arguments += ["--texts", json.dumps(texts), "--seed", str(self._options.seed + index)]
            clients.append(await start(stack, log, "tandem_bench.scale.streams", *arguments))
        # Between two streams of a connection there is a moment without one.
        wanted = 0.98 * self._options.streams
        took_s = await until(lambda: _num_live(clients) >= wanted, f"{wanted:.0f} streams are live")
        self.note(f"{_num_live(clients)} live streams after {took_s:.1f} s")
        self._clients = clients

    def _look(self) -> int:
        """Return how many streams are live now, and remember the fewest since all had begun."""
        if not self._clients:
            return 0
        live = _num_live(self._clients)
        self._fewest_live = min(self._fewest_live, live)
        return live

    async def storms(self) -> None:
        """Have each kind of storm, then all at once; measure how long until all sessions are there again."""
        workers = self._workers
        await self._steady()
        for name, storm in (("crash", (workers.crash, workers.join)), ("leave", (workers.leave, workers.join))):
            await self._storm(f"{workers.each} {name}, as many join", *storm)
        await self._storm("all at once", workers.crash, workers.leave, workers.join, workers.join)
        await self._steady()

    async def _storm(self, name: str, *deeds: Callable[[], Any]) -> None:
        self.note(f"{name}: {self._look()} live streams")
        for deed in deeds:
            await deed()
        took_s = await until(self._has_all_sessions, "the new workers have sessions with all routers")
        self._rows.append(figure(f"{name}: until the new ones have all sessions", took_s, "s"))
        await self._steady()

    async def _steady(self) -> None:
        """Let things run, and count what they cost."""
        before_s, begun_s = self._routers_cpu_s(), time.monotonic()
        while time.monotonic() - begun_s < self._options.seconds:
            await asyncio.sleep(LOOK_S)
            self._look()
        took_s = time.monotonic() - begun_s
        shares = [(b - a) / took_s for a, b in zip(before_s, self._routers_cpu_s(), strict=True)]
        self.note(f"{self._look()} live streams; processor time of routers {', '.join(f'{s:.0%}' for s in shares)}")

    def _routers_cpu_s(self) -> list[float]:
        """Return the processor time of each router. Raises CannotMeasure when one has ended."""
        try:
            return [sum(process.cpu_times()[:2]) for process in self._routers]
        except psutil.NoSuchProcess as error:
            raise CannotMeasure(f"a router has ended: {error}") from None

    async def end_streams(self) -> None:
        """Begin no more streams, wait for all, and add what became of them. Raises CannotMeasure."""
        for client in self._clients:
            client.send(signal.SIGTERM)
        patience_s = 2 * self._options.tokens * STEP_S + 2 * HUNG_S
        await until(lambda: all(client.reading.done() for client in self._clients), "all streams end", patience_s)
        ended: Counter[str] = Counter()
        for client in self._clients:
            ended.update(client.last["ended"])
        num_begun = sum(client.last["begun"] for client in self._clients)
        if any(client.process.returncode for client in self._clients) or ended.total() != num_begun:
            raise CannotMeasure(f"{num_begun} streams began, and clients know of {ended.total()} that ended")
        for how, count in ended.most_common():
            self.note(f"{count} streams: {how}")
        whole, wrong, hung = (ended.pop(how, 0) for how in ("whole", "wrong text", "hung"))
        untold = sum(count for how, count in ended.items() if how.startswith(_UNTOLD))
        self._rows += [
            figure("live streams, at the fewest", self._fewest_live, ""),
            figure("streams ended with exactly their text", whole, ""),
            figure("streams with another text", wrong, "", at_most=0),
            figure(f"streams that hung for {HUNG_S:g} s", hung, "", at_most=0),
            figure("streams that ended without a reason", untold, "", at_most=0),
            figure("streams that ended and said why", ended.total() - untold, ""),
            *self._quantiles("wait for the first token", "first_waits_s"),
            *self._quantiles("longest pause of a stream", "pauses_s"),
            *(figure("memory of a router", one.memory_info().rss / (1 << 20), "MB") for one in self._routers),
        ]

    def _quantiles(self, name: str, what: str) -> list[Row]:
        """Return the greatest of the clients' quantiles, which is at least that of all of them together."""
        return [
            figure(f"{name}: {share}", max(client.last[what].get(share, 0.0) for client in self._clients), "s")
            for share in SHARES
        ]


def _num_live(clients: Sequence[ReportingProcess]) -> int:
    for client in clients:
        client.check()
    return sum(client.last.get("live", 0) for client in clients)


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
            started = routers(options.routers, redis.port, secret, folder, log)
            port, router_pids = await stack.enter_async_context(started)
            workers = Workers(stack, log, each=options.storm, redis_port=redis.port, secret=secret, says=says)
            run = Measurement(options, workers, router_pids, rows, err)
            await run.open_sessions()
            await run.begin_streams(stack, log, port, _texts_of(says))
            await run.storms()
            await run.end_streams()
        except CannotMeasure as error:
            raise CannotMeasure(f"{error}\n{last_words(folder / 'log')}") from None
    print_table(out, rows)
