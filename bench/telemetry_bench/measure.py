"""The whole of `python -m bench telemetry`: the same cluster with and without telemetry, in alternating turns.

Clusters of all kinds run side by side and take turns under load, in an order that moves on by one each round. A round
compares each with the one that has no telemetry, so what slows the machine for longer than a round cancels; a second
cluster without telemetry shows what is left. Metrics are counted in all of them: that cannot be switched off.
"""

import argparse
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from bench.clusters import Setup, running
from bench.errors import CannotMeasure
from bench.report import Row, figure, show
from bench.router_bench import doors
from bench.telemetry_bench.receiver import span_counter
from bench.telemetry_bench.turns import LOADS, Load, Subject, Turn, processes_of, take_turn

MAX_COST_PERCENT = 3.0
PRODUCTION_RATIO = 0.01
_SPANS_AT_LEAST = 3
"""Of a request that is traced, in the router alone."""
_FIRST_TURN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way of watching a cluster."""

    name: str
    sample_ratio: float | None
    """None: no telemetry at all."""
    goal: float | None = None


OFF = Kind(name="off", sample_ratio=None)
KINDS = (
    Kind(name="off again", sample_ratio=None),
    Kind(name="production", sample_ratio=PRODUCTION_RATIO, goal=MAX_COST_PERCENT),
    Kind(name="every trace", sample_ratio=1.0),
)
Rounds = dict[tuple[Load, Kind], list[Turn]]
Started = tuple[str, Mapping[str, psutil.Process]]
"""Its URL, and its processes by role."""
Part = Callable[[AsyncExitStack, dict[str, Any]], Awaitable[Started]]


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Measure and show."""
    parts = given.only or list(PARTS)
    for part in parts:
        turns: Rounds = {(load, kind): [] for load in LOADS for kind in (OFF, *KINDS)}
        await _sit(PARTS[part], turns, given.seconds / len(parts), given.turn)
        err.print(f"{part}: {len(turns[LOADS[0], OFF])} rounds")
        found = [row for load in LOADS for row in _rows(turns, load, part)]
        show(out, found)
        rows += found


async def _sit(part: Part, turns: Rounds, rounds_s: float, turn_s: float) -> None:
    """Clusters of their own, and rounds for so long."""
    async with AsyncExitStack() as stack:
        subjects = {kind: await _start(part, stack, kind) for kind in (OFF, *KINDS)}
        counts = {load: await _turn_size(subjects, load, turn_s) for load in LOADS}
        kinds, end_s = list(subjects), time.monotonic() + rounds_s
        while time.monotonic() < end_s:
            kinds = [*kinds[1:], kinds[0]]
            for kind in kinds:
                for load, num_requests in counts.items():
                    turns[load, kind].append(await take_turn(subjects[kind], load, num_requests))


async def _start(part: Part, stack: AsyncExitStack, kind: Kind) -> Subject:
    counter = None
    more: dict[str, Any] = {"log_level": "warning"}
    if kind.sample_ratio is not None:
        counter = await stack.enter_async_context(span_counter())
        traces = {"otlp_endpoint": counter.url, "sample_ratio": kind.sample_ratio}
        more = {"telemetry": traces, "log_level": "info", "log_format": "json"}
    url, processes = await part(stack, more)
    return Subject(name=kind.name, url=url, processes=processes, spans=counter, is_scraped=counter is not None)


async def _whole_cluster(stack: AsyncExitStack, more: dict[str, Any]) -> Started:
    """The built-in model; every prompt goes through both pools."""
    setup = Setup(mode="shm", local_prefill_tokens=0, num_threads=1, more=more)
    cluster = await stack.enter_async_context(running(setup))
    return cluster.url, processes_of(cluster.pids)


async def _router_alone(stack: AsyncExitStack, more: dict[str, Any]) -> Started:
    """Over workers without a model: what a router can do at most is where telemetry is felt most."""
    url, router = stack.enter_context(doors.cluster(num_workers=1, step_ms=1.0, more=more))
    return url, {"router": router}


PARTS: Mapping[str, Part] = {"router": _router_alone, "cluster": _whole_cluster}


async def _turn_size(subjects: dict[Kind, Subject], load: Load, turn_s: float) -> int:
    """Requests that take about so long; every cluster is warm afterwards."""
    rates = [(await take_turn(subject, load, _FIRST_TURN)).requests_per_s for subject in subjects.values()]
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
        rows.append(figure(f"{name}, more CPU", _cost(off, found, lambda t: t.whole_cpu_ms), "%", at_most=kind.goal))
        rows += [
            figure(f"{name}, more CPU of {role}", _cost(off, found, partial(_cpu_ms, role)), "%") for role in roles
        ]
    return rows


def _check_spans(kind: Kind, load: Load, turns: Sequence[Turn]) -> None:
    """Raises CannotMeasure when what was to be paid for was not there."""
    if kind.sample_ratio is None:
        return
    num_spans = sum(turn.num_spans for turn in turns)
    expected = sum(turn.num_requests for turn in turns) * kind.sample_ratio * _SPANS_AT_LEAST
    # By chance there are fewer, and those of a turn's last half second come in the next one.
    if num_spans < 0.5 * expected - 10 * _SPANS_AT_LEAST:
        raise CannotMeasure(f"{kind.name}, {load.name}: {num_spans} spans came, not {expected:.0f}")


def _cpu_ms(role: str, turn: Turn) -> float:
    return turn.cpu_ms[role]


def _pace(turn: Turn) -> float:
    return 1.0 / turn.requests_per_s


def _cost(off: Sequence[Turn], found: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    """Per cent more than without, the median over rounds."""
    return 100.0 * (median(of(b) / of(a) for a, b in zip(off, found, strict=True)) - 1.0)
