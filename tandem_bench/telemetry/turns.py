"""One cluster's turn under one load: its throughput, and the processor time of each of its processes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem_bench.errors import CannotMeasure
from tandem_bench.router.costs import run_client
from tandem_bench.telemetry.receiver import SpanCounter

ROLES = ("router", "decode", "prefill")
_MODULES = {"router": "router", "decode": "decode_worker", "prefill": "prefill_worker"}
_WORDS = "Once upon a time there was a little girl who had a red ball and a big dog. "
_SCRAPE_S = 1.0
_NUM_CLIENTS = 16
_serial = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one repeated request, each time with its own cache salt, so that every prompt uses both pools."""

    name: str
    max_tokens: int
    stream: bool

    def body(self) -> dict[str, Any]:
        """Return the body of the HTTP request."""
        messages = [{"role": "user", "content": _WORDS * 6}]
        fixed = {"temperature": 0, "ignore_eos": True, "stream": self.stream}
        return {"messages": messages, "max_tokens": self.max_tokens, **fixed}


LOADS = (
    Load(name="whole answers of 8 tokens", max_tokens=8, stream=False),
    Load(name="streams of 64 tokens", max_tokens=64, stream=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Cluster whose spans go to a counter."""

    url: str
    processes: Mapping[str, psutil.Process]
    """Processes of the cluster by role."""
    spans: SpanCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Figures of one turn."""

    requests_per_s: float
    tokens_per_s: float
    cpu_ms: Mapping[str, float]
    """Processor time per request, by role."""
    num_requests: int
    num_spans: int

    @property
    def whole_cpu_ms(self) -> float:
        return sum(self.cpu_ms.values())


def cpu_s(process: psutil.Process) -> float:
    """Return processor time so far of all live threads, in nanoseconds; the usual count has ticks of 10 ms."""
    schedstats = (one.read_text() for one in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    return sum(int(text.split()[0]) for text in schedstats) / 1e9


def processes_of(pids: tuple[int, ...]) -> dict[str, psutil.Process]:
    """Return the processes that `tandem up` has started, by role."""
    found: dict[str, psutil.Process] = {}
    for pid in pids:
        for child in psutil.Process(pid).children(recursive=True):
            command = child.cmdline()
            found |= {role: child for role, module in _MODULES.items() if command[1:3] == ["-m", module]}
    if set(found) != set(ROLES):
        raise CannotMeasure(f"a cluster without {', '.join(sorted(set(ROLES) - set(found)))}")
    return found


async def take_turn(subject: Subject, load: Load, num_requests: int, *, is_scraped: bool) -> Turn:
    """Send the requests, with or without a scrape each second. Raises CannotMeasure."""
    before = {role: cpu_s(process) for role, process in subject.processes.items()}
    spans = subject.spans.num_spans
    async with _scraped(subject.url, is_scraped=is_scraped):
        tally = await asyncio.to_thread(
            run_client,
            subject.url,
            load.body(),
            connections=_NUM_CLIENTS,
            requests=num_requests,
            salt=f"turn-{next(_serial)}",
        )
    if tally["bad"]:
        raise CannotMeasure(f"{load.name}: {tally['bad']} of {tally['requests']} requests were refused")
    spent = {role: cpu_s(process) - before[role] for role, process in subject.processes.items()}
    return Turn(
        requests_per_s=tally["requests"] / tally["seconds"],
        tokens_per_s=tally["requests"] * load.max_tokens / tally["seconds"],
        cpu_ms={role: 1e3 * seconds / tally["requests"] for role, seconds in spent.items()},
        num_requests=tally["requests"],
        num_spans=subject.spans.num_spans - spans,
    )


@asynccontextmanager
async def _scraped(url: str, *, is_scraped: bool) -> AsyncIterator[None]:
    if not is_scraped:
        yield
        return
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        scraping = tasks.create_task(_scrape(http))
        yield
        scraping.cancel()


async def _scrape(http: httpx.AsyncClient) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(_SCRAPE_S / 2)  # otherwise a turn of little more than a second would include two
        while True:
            (await http.get("/metrics")).raise_for_status()
            await asyncio.sleep(_SCRAPE_S)
