"""All of `python -m tandem_bench telemetry`: one cluster, alternately with and without telemetry.

The cost of telemetry is smaller than the variation between processes (memory placement, order of sets): two equal
clusters may differ by 16 %. So a single cluster is used, and SIGHUP switches it between turns, in an order that rotates
by one each round. A round compares each kind with the turn without telemetry, so anything that slows the machine for
longer than a round cancels; a second turn without telemetry shows what is left. What cannot be disabled is in all
turns: metrics are counted, and spans have a destination.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

import psutil
import yaml
from rich.console import Console

from tandem_bench.clusters import Setup, running
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure, print_table
from tandem_bench.router import costs as router_costs
from tandem_bench.telemetry.receiver import span_counter
from tandem_bench.telemetry.spans import measure_spans
from tandem_bench.telemetry.turns import LOADS, Load, Subject, Turn, processes_of, take_turn

SPANS = "spans"
SETTLED_S = 0.5
"""Time to settle: reading a YAML takes some hundredths of a second; the previous turn's spans leave within this, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Telemetry settings of a cluster."""

    name: str
    sample_ratio: float = 0.0
    is_watched: bool = True
    """Whether metrics are scraped each second and a JSON log at `info` is written; otherwise only warnings are logged.
    """
    goal: float | None = None

    def rewrite(self, path: Path) -> None:
        """Write these settings into a configuration file and keep the rest of it."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content["telemetry"]["sample_ratio"] = self.sample_ratio
        level, style = ("info", "json") if self.is_watched else ("warning", "text")
        content |= {"log_level": level, "log_format": style}
        written = path.with_suffix(".new")
        written.touch(mode=0o600)
        written.write_text(yaml.safe_dump(content), encoding="utf-8")
        written.replace(path)


OFF = Kind(name="off", is_watched=False)


async def switch(processes: Mapping[str, psutil.Process], kind: Kind) -> None:
    for path in {_config(process) for process in processes.values()}:
        kind.rewrite(path)
    for process in processes.values():
        os.kill(process.pid, signal.SIGHUP)
    await asyncio.sleep(SETTLED_S)


def _config(process: psutil.Process) -> Path:
    command = process.cmdline()
    return Path(command[command.index("--config") + 1])


MAX_COST_PERCENT = 3.0
PRODUCTION_RATIO = 0.01
_SPANS_AT_LEAST = 3
"""Minimum spans of a traced request, in the router alone."""
_FIRST_TURN = 24
KINDS = (
    Kind(name="off again", is_watched=False),
    Kind(name="production", sample_ratio=PRODUCTION_RATIO, goal=MAX_COST_PERCENT),
    Kind(name="every trace", sample_ratio=1.0),
)
Rounds = dict[tuple[Load, Kind], list[Turn]]
Started = tuple[str, Mapping[str, psutil.Process]]
"""URL of a cluster, and its processes by role."""
Part = Callable[[AsyncExitStack, dict[str, Any]], Awaitable[Started]]


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    parts = given.only or [SPANS, *PARTS]
    if SPANS in parts:
        found = await asyncio.to_thread(measure_spans)
        print_table(out, found)
        rows += found
    parts = [part for part in parts if part != SPANS]
    for part in parts:
        turns: Rounds = {(load, kind): [] for load in LOADS for kind in (OFF, *KINDS)}
        await _sit(PARTS[part], turns, given.seconds / len(parts), given.turn)
        err.print(f"{part}: {len(turns[LOADS[0], OFF])} rounds")
        found = [row for load in LOADS for row in _rows(turns, load, part)]
        print_table(out, found)
        rows += found


async def _sit(part: Part, turns: Rounds, rounds_s: float, turn_s: float) -> None:
    """Run a cluster, and rounds for a given time."""
    async with AsyncExitStack() as stack:
        subject = await _start(part, stack)
        counts = {load: await _turn_size(subject, load, turn_s) for load in LOADS}
        kinds, end_s = [OFF, *KINDS], time.monotonic() + rounds_s
        while time.monotonic() < end_s:
            kinds = [*kinds[1:], kinds[0]]
            for kind in kinds:
                await switch(subject.processes, kind)
                for load, num_requests in counts.items():
                    turn = await take_turn(subject, load, num_requests, is_scraped=kind.is_watched)
                    turns[load, kind].append(turn)


async def _start(part: Part, stack: AsyncExitStack) -> Subject:
    counter = await stack.enter_async_context(span_counter())
    more = {"telemetry": {"otlp_endpoint": counter.url, "sample_ratio": 0.0}, "log_level": "warning"}
    url, processes = await part(stack, more)
    return Subject(url=url, processes=processes, spans=counter)


async def _whole_cluster(stack: AsyncExitStack, more: dict[str, Any]) -> Started:
    """Start the built-in model, with every prompt through both pools."""
    setup = Setup(mode="shm", local_prefill_tokens=0, num_threads=1, more=more)
    cluster = await stack.enter_async_context(running(setup))
    return cluster.url, processes_of(cluster.pids)


async def _router_alone(stack: AsyncExitStack, more: dict[str, Any]) -> Started:
    """Start a router over workers without a model, where the cost of telemetry is most visible."""
    url, router = stack.enter_context(router_costs.cluster(num_workers=1, step_ms=1.0, more=more))
    return url, {"router": router}


PARTS: Mapping[str, Part] = {"router": _router_alone, "cluster": _whole_cluster}


async def _turn_size(subject: Subject, load: Load, turn_s: float) -> int:
    """Return the number of requests that take about this long; the cluster is warm afterwards."""
    rates = [(await take_turn(subject, load, _FIRST_TURN, is_scraped=True)).requests_per_s for _ in range(3)]
    return max(_FIRST_TURN, int(median(rates) * turn_s))


def _rows(turns: Rounds, load: Load, part: str) -> list[Row]:
    off, title = turns[load, OFF], f"{part}, {load.name}"
    roles = list(off[0].cpu_ms)
    rows = [
        figure(f"{title}: off", median(turn.requests_per_s for turn in off), "requests/s"),
        figure(f"{title}: off", median(turn.tokens_per_s for turn in off), "tokens/s"),
    ]
    rows += [figure(f"{title}: off, {role}", median(t.cpu_ms[role] for t in off), "CPU ms/request") for role in roles]
    for kind in KINDS:
        found, name = turns[load, kind], f"{title}: {kind.name}"
        _check_spans(kind, load, found)
        rows.append(figure(f"{name}, throughput lost", _cost(off, found, _pace), "%", at_most=kind.goal))
        rows.append(figure(f"{name}, throughput lost, standard error", _error(off, found, _pace), "%"))
        rows.append(figure(f"{name}, more CPU", _cost(off, found, lambda t: t.whole_cpu_ms), "%", at_most=kind.goal))
        rows += [
            figure(f"{name}, more CPU of {role}", _cost(off, found, partial(_cpu_ms, role)), "%") for role in roles
        ]
    return rows


def _check_spans(kind: Kind, load: Load, turns: Sequence[Turn]) -> None:
    """Raise CannotMeasure when expected spans did not arrive, or unexpected ones did."""
    num_spans, num_requests = sum(turn.num_spans for turn in turns), sum(turn.num_requests for turn in turns)
    expected = num_requests * kind.sample_ratio * _SPANS_AT_LEAST
    # The number varies randomly, and a turn's last spans may arrive in the next one.
    too_few = num_spans < 0.5 * expected - 10 * _SPANS_AT_LEAST
    if too_few or (not expected and num_spans > 0.1 * num_requests):
        raise CannotMeasure(f"{kind.name}, {load.name}: {num_spans} spans came, not {expected:.0f}")


def _cpu_ms(role: str, turn: Turn) -> float:
    return turn.cpu_ms[role]


def _pace(turn: Turn) -> float:
    return 1.0 / turn.requests_per_s


def _cost(off: Sequence[Turn], found: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    """Return the additional cost in per cent, as the median over rounds."""
    return 100.0 * (median(_ratios(off, found, of)) - 1.0)


def _error(off: Sequence[Turn], found: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    """Return the standard error of that median in per cent: sqrt(pi / 2) times that of the mean, for a normal
    distribution.
    """
    ratios = _ratios(off, found, of)
    return 125.3 * stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0


def _ratios(off: Sequence[Turn], found: Sequence[Turn], of: Callable[[Turn], float]) -> list[float]:
    return [of(b) / of(a) for a, b in zip(off, found, strict=True)]
