"""`python -m tandem_bench.router.overload`: a cluster under three times its capacity, and fairness between tenants.

In the fairness part one tenant sends ten times as many requests as each of the others. Goodput is answers per second
whose first token came within `TTFT_S` and whose others came within `TPOT_S` on average. Arrivals are Poisson and
open-loop: clients do not wait for one another. Prompts are random, so nothing is cached. Load levels are fractions of
what the same cluster did just before with a fixed number of clients.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console

from tandem_bench import report
from tandem_bench.client import Client
from tandem_bench.clusters import Setup, running
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure

TTFT_S = 1.0
TPOT_S = 0.1
PRESSED_QUEUE_S = 0.25
"""Queue limit: a quarter of the TTFT bound; the rest is for computing, and for a machine that stalls."""
FAIR_QUEUE_S = 5.0
"""Queue limit so long that only the order of admission separates tenants."""
PROMPT_TOKENS = 384
ANSWER_TOKENS = 16
NUM_MODEST = 4
MODEST_LOAD = 0.5
"""Share of capacity that all modest tenants use together; the greedy one sends ten times the requests of one of them.
"""
LOADS = (0.7, 0.85, 1.0)
GREEDY = "greedy"
REJECTION_MS = 20.0
ENDLESS_S = 1e6
PARTS = ("pressed", "fairness")
_CLIENTS = 24
_WORDS = range(300, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Result of one request, in seconds from its sending."""

    tenant: str
    status: int
    is_whole: bool
    """Whether it is a stream with text, an end mark and no error: what its client waited for."""
    first_s: float
    """Time to the first token of an answer, or to the end of a rejection."""
    last_s: float
    retry_after_s: float | None = None
    """Delay after which a rejection says to retry."""

    @property
    def is_good(self) -> bool:
        tpot_s = (self.last_s - self.first_s) / (ANSWER_TOKENS - 1)
        return self.is_whole and self.first_s <= TTFT_S and tpot_s <= TPOT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSetup(Setup):
    """Cluster with an API key for each tenant."""

    max_queue_s: float

    def config(self, ports: Sequence[int]) -> dict[str, Any]:
        """Return the configuration of `Setup` with limits."""
        content = Setup.config(self, ports)
        keys = [{"key": f"key-of-{tenant}", "tenant": tenant} for tenant in (*modest(), GREEDY)]
        content["router"] |= {
            "api_keys": keys,
            "max_queue_s": self.max_queue_s,
            "queue": {"worker_backlog_s": 0.05, "max_running_per_worker": _CLIENTS},
        }
        return content


def modest() -> tuple[str, ...]:
    """Return the tenants other than the greedy one."""
    return tuple(f"modest-{number}" for number in range(NUM_MODEST))


async def send_request(port: int, tenant: str, rng: Random) -> Answered:
    """Request one streamed completion on a connection of its own, at little cost. Raises OSError."""
    prompt = [rng.choice(_WORDS) for _ in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer key-of-{tenant}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sent_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(None, 2)[1])
        first_s, received = None, bytearray()
        while chunk := await reader.read(65536):
            received += chunk
            if first_s is None and b'"text"' in received:
                first_s = time.monotonic() - sent_s
        last_s = time.monotonic() - sent_s
        retry_after = re.search(rb"\r\nretry-after: *([0-9.]+)", answer.lower())
        return Answered(
            tenant=tenant,
            status=status,
            is_whole=status == 200 and first_s is not None and _is_whole(received),
            first_s=last_s if first_s is None or status != 200 else first_s,
            last_s=last_s,
            retry_after_s=None if retry_after is None else float(retry_after[1]),
        )
    finally:
        writer.close()


def _is_whole(stream: bytes | bytearray) -> bool:
    return b"data: [DONE]" in stream and b'"error"' not in stream


@dataclass(slots=True, kw_only=True)
class Load:
    """Sends load to one cluster, each time with new prompts."""

    port: int
    url: str
    seed: int = 1

    async def refused_late(self) -> float:
        """Return the number of requests that were rejected after waiting in the queue."""
        async with Client(self.url) as client:
            return (await client.counts("tandem_rejections_total")).get("hopeless", 0.0)

    async def closed(self, seconds: float) -> float:
        """Return answers per second with a fixed number of clients, which honour Retry-After."""
        ends_s = time.monotonic() + seconds
        done = 0

        async def client(rng: Random) -> None:
            nonlocal done
            while time.monotonic() < ends_s:
                answered = await send_request(self.port, modest()[0], rng)
                done += answered.is_whole and time.monotonic() <= ends_s
                await asyncio.sleep(answered.retry_after_s or 0.0)

        self.seed += 1
        async with asyncio.TaskGroup() as tasks:
            for number in range(_CLIENTS // 2):
                tasks.create_task(client(Random(f"{self.seed}.{number}")))
        return done / seconds

    async def open(self, rates: dict[str, float], seconds: float, *, times: int | None = None) -> list[Answered]:
        """Send each tenant's arrivals at its rate, and wait for all answers; equal `times` give equal arrival times."""
        self.seed += 1
        plan: list[tuple[float, str]] = []
        for tenant, rate in rates.items():
            rng, at_s = Random(f"{self.seed if times is None else times}.{tenant}"), 0.0
            while (at_s := at_s + rng.expovariate(rate)) < seconds:
                plan.append((at_s, tenant))
        tasks: list[asyncio.Task[Answered]] = []
        rng, started_s = Random(self.seed), time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at_s, tenant in sorted(plan):
                await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
                tasks.append(group.create_task(send_request(self.port, tenant, rng)))
        return [task.result() for task in tasks]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values; infinite without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("inf")


async def pressed_rows(load: Load, seconds: float, note: Callable[[str], None]) -> list[Row]:
    """Compare goodput at three times the capacity with the best at any load."""
    capacity = max(await load.closed(seconds / 2), await load.closed(seconds / 2))
    best = 0.0
    for level in LOADS:
        answered = await load.open(dict.fromkeys(modest(), level * capacity / NUM_MODEST), seconds)
        good = sum(a.is_good for a in answered) / seconds
        note(f"load {level:g}: {good:.1f} good answers per second of {level * capacity:.1f}")
        best = max(best, good)
    before = await load.refused_late()
    answered = await load.open(dict.fromkeys(modest(), 3.0 * capacity / NUM_MODEST), seconds)
    good, late = sum(a.is_good for a in answered) / seconds, await load.refused_late() - before
    refused = [a for a in answered if a.status in (429, 503)]
    served = [a for a in answered if a.is_whole]
    note(f"load 3: {good:.1f} good answers, {len(refused) / seconds:.1f} refusals per second")
    times_ms, lost = [1e3 * a.last_s for a in refused], len(answered) - len(served) - len(refused)
    immediate = sorted(times_ms)[: len(times_ms) - int(late)]
    retry_after = sum(a.retry_after_s is not None for a in refused) / max(1, len(refused))
    return [
        figure("overload: capacity", capacity, "requests/s"),
        figure("overload: best goodput", best, "requests/s"),
        figure("overload: goodput at 3x, of best", good / best if best else 0.0, "", at_least=0.9),
        figure("overload: refusals at 3x, p50", quantile(times_ms, 0.5), "ms"),
        figure("overload: refusals at 3x, p99", quantile(times_ms, 0.99), "ms", at_most=REJECTION_MS),
        figure("overload: immediate refusals, p99", quantile(immediate, 0.99), "ms"),
        figure("overload: refused after a wait", late / max(1, len(refused)), "of refusals"),
        figure("overload: refusals with Retry-After", retry_after, "", at_least=1.0),
        figure("overload: accepted in time at 3x", sum(a.is_good for a in served) / max(1, len(served)), ""),
        figure("overload: neither answered whole nor refused", lost, "requests", at_most=0.0),
    ]


async def fairness_rows(load: Load, seconds: float, rounds: int, note: Callable[[str], None]) -> list[Row]:
    """Compare first tokens of modest tenants with and without a greedy one, alternately; medians over the rounds.

    Arrival times are the same in both cases: the slowest hundredth is the densest crowd among themselves.
    """
    capacity = max(await load.closed(seconds / 2), await load.closed(seconds / 2))
    share = MODEST_LOAD * capacity / NUM_MODEST
    before: list[float] = []
    after: list[float] = []
    served: list[float] = []
    refused = 0
    for times in range(rounds):
        alone = await load.open(dict.fromkeys(modest(), share), seconds, times=times)
        with_greedy = await load.open({**dict.fromkeys(modest(), share), GREEDY: 10 * share}, seconds, times=times)
        others = [a for a in with_greedy if a.tenant != GREEDY]
        greedy = [a for a in with_greedy if a.tenant == GREEDY]
        # A rejected or broken request has no answer: it counts as infinite.
        for p99s, found in ((before, alone), (after, others)):
            p99s.append(1e3 * quantile([a.first_s if a.is_whole else ENDLESS_S for a in found], 0.99))
        refused += sum(not a.is_whole for a in others)
        served.append(sum(a.is_whole for a in greedy) / max(1, len(greedy)))
        note(f"TTFT p99 {before[-1]:.0f} ms of {len(alone)} alone, {after[-1]:.0f} ms of {len(others)} with the greedy")
    return [
        figure("fairness: modest tenants alone, TTFT p99", median(before), "ms"),
        figure("fairness: beside one at 10x, TTFT p99", median(after), "ms"),
        figure("fairness: the one over the other", median(map(truediv, after, before)), "", at_most=1.5),
        figure("fairness: refused or broken beside it", refused, "requests"),
        figure("fairness: served of the one at 10x", median(served), ""),
    ]


async def rows(
    parts: Sequence[str] = PARTS,
    *,
    seconds: float = 6.0,
    rounds: int = 5,
    mode: str = "shm",
    note: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure the requested parts, each on a cluster of its own. Raises CannotMeasure."""
    found: list[Row] = []
    if "pressed" in parts:
        async with _loaded(mode, PRESSED_QUEUE_S) as load:
            found += await pressed_rows(load, seconds, note)
    if "fairness" in parts:
        async with _loaded(mode, FAIR_QUEUE_S) as load:
            found += await fairness_rows(load, seconds, rounds, note)
    return found


@asynccontextmanager
async def _loaded(mode: str, max_queue_s: float) -> AsyncIterator[Load]:
    """Run a cluster and measure its own capacity."""
    async with running(OverloadSetup(mode=mode, num_threads=1, max_queue_s=max_queue_s)) as cluster:
        load = Load(port=int(cluster.url.rpartition(":")[2]), url=cluster.url)
        await load.closed(3.0)
        yield load


def _measure(options: argparse.Namespace, note: Callable[[str], None]) -> Coroutine[None, None, list[Row]]:
    return rows(options.only, seconds=options.seconds, rounds=options.rounds, mode=options.mode, note=note)


def main() -> int:
    """Run as a command; return 1 when a goal was missed, 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.router.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per load level (default: 6)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the fairness part (default: 5)")
    parser.add_argument("--mode", default="shm", help="`colocated`, or a KV transport (default: shm)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, default=PARTS, help="pressed, fairness")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    options = parser.parse_args()
    err = Console(stderr=True, highlight=False)

    def note(text: str) -> None:
        err.print(f"[dim]{text}[/dim]", soft_wrap=True)

    try:
        found = asyncio.run(_measure(options, note))
    except (CannotMeasure, OSError) as error:
        err.print(str(error), style="red", soft_wrap=True)
        return 2
    report.print_table(Console(highlight=False, width=120), found)
    if options.json is not None:
        report.write_json(options.json, found, about=report.circumstances([sys.executable, *sys.argv]))
    return 1 if report.num_missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
