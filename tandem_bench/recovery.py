"""Pauses of a live stream when processes of its cluster are killed, and where that time goes.

The cluster has two prefill workers, two decode workers and one router; the stream uses gRPC and resumes by its ids when
the router dies; some of the processes get SIGKILL at once. The pause is the longest silence of the stream.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.process_view import ProcessView, SilentWatcher
from cluster.supervisor.supervisor import ProcessState, RestartPolicy, Role
from tandem.client.aio import AsyncClient
from tandem.client.options import Options
from tandem.config.cluster import load
from tandem_bench import report
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure

_VICTIMS = {
    "one decode worker": ("decode-serving",),
    "both decode workers": ("decode-0", "decode-1"),
    "all four workers": ("prefill-0", "prefill-1", "decode-0", "decode-1"),
    "all five processes": ("router", "prefill-0", "prefill-1", "decode-0", "decode-1"),
}
_PROMPT = "Once upon a time there was a small house by the sea, and"
_TOKENS_BEFORE = 30
_MAX_TOKENS = 1200
_MAX_RECONNECTS = 1_000
"""Maximum reconnects: the only router may be gone for a while."""
_WAIT_S = 120.0
_CALM_S = 8.0
"""Pause between rounds, after which restarted processes have settled, including a standby worker."""
_CONFIG = {
    "prefill.replicas": 2,
    "decode.replicas": 2,
    "router.port": 0,
    "router.grpc_port": 0,
    "router.max_local_prefill_tokens": 64,
    "engine.device": "cpu",
    "engine.num_threads": 1,
    "log_level": "warning",
}


@dataclass(slots=True)
class _Restart:
    """Times of one process's restart, on the monotonic clock."""

    launched_s: float | None = None
    ready_s: float | None = None
    load_s: float = 0.0
    """Part of the start from the model's file to serving; the rest is the interpreter and its imports."""


@dataclass(slots=True)
class _Moments(SilentWatcher):
    """Records when processes start and serve."""

    restarts: dict[str, _Restart] = field(default_factory=dict)

    def on_state(self, view: ProcessView) -> None:
        now = time.monotonic()
        restart = self.restarts.setdefault(view.name, _Restart())
        if view.state is ProcessState.STARTING:
            restart.launched_s, restart.ready_s = now, None
        elif view.state is ProcessState.READY and restart.ready_s is None:
            restart.ready_s, restart.load_s = now, float(view.ready.get("load_s", 0.0))


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows` case by case. Raises CannotMeasure when a stream does not resume."""
    config = load(None, {**_CONFIG, "standby_workers": options.standby})
    moments = _Moments()
    policy = RestartPolicy(stable_s=1.0, max_rapid_deaths=1000)
    try:
        async with LocalCluster(config, watcher=moments, policy=policy) as cluster:
            for case, victims in _VICTIMS.items():
                err.print(f"{case} ...")
                rounds = [await _round(cluster, moments, victims) for _ in range(options.rounds)]
                rows += _figures(case, rounds)
    finally:
        report.print_table(out, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One pause, divided by what happened first among the killed processes that can serve the stream."""

    pause_s: float
    until_launch_s: float
    start_s: float
    load_s: float
    until_token_s: float


def _figures(case: str, rounds: Sequence[_Round]) -> list[Row]:
    def median(name: str) -> float:
        return round(statistics.median(float(getattr(one, name)) for one in rounds), 2)

    rows = [
        figure(f"{case}: longest pause of the stream", median("pause_s"), "s"),
        figure(f"{case}: worst of {len(rounds)}", round(max(one.pause_s for one in rounds), 2), "s"),
    ]
    if not all(one.until_launch_s for one in rounds):
        return rows  # another worker continued the stream: no start was awaited
    return [
        *rows,
        figure(f"{case}: from the kill to the first start", median("until_launch_s"), "s"),
        figure(f"{case}: interpreter and imports", median("start_s"), "s"),
        figure(f"{case}: model, memory and listening", median("load_s"), "s"),
        figure(f"{case}: from serving to the next token", median("until_token_s"), "s"),
    ]


async def _round(cluster: LocalCluster, moments: _Moments, victims: Sequence[str]) -> _Round:
    await asyncio.sleep(_CALM_S)
    await _until_all_serve(cluster)
    arrivals: list[float] = []
    killed_s = 0.0
    async with AsyncClient(cluster.grpc_address, max_reconnects=_MAX_RECONNECTS) as client:
        options = Options(max_tokens=_MAX_TOKENS, min_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0)
        async with asyncio.timeout(_WAIT_S):
            async for piece in client.stream(_PROMPT, options):
                arrivals += [time.monotonic()] * len(piece.token_ids)
                if not killed_s and len(arrivals) >= _TOKENS_BEFORE:
                    killed_s = time.monotonic()
                    names = await _named(cluster, victims)
                    moments.restarts.clear()
                    _kill(cluster, names)
                if killed_s and arrivals[-1] - killed_s > 1.0 and _longest(arrivals)[0] < arrivals[-1] - 0.5:
                    break  # the stream continues: the rest of the answer adds nothing
    began, ended = _longest(arrivals)
    back = [r for name, r in moments.restarts.items() if r.ready_s is not None and name.startswith("decode")]
    first = min(back, key=lambda r: r.ready_s or 0.0, default=None)
    if first is None or first.ready_s is None or first.launched_s is None or first.ready_s > ended:
        return _Round(pause_s=ended - began, until_launch_s=0.0, start_s=0.0, load_s=0.0, until_token_s=ended - began)
    return _Round(
        pause_s=ended - began,
        until_launch_s=first.launched_s - killed_s,
        start_s=first.ready_s - first.launched_s - first.load_s,
        load_s=first.load_s,
        until_token_s=ended - first.ready_s,
    )


def _longest(arrivals: Sequence[float]) -> tuple[float, float]:
    """Return both ends of the longest silence."""
    return max(itertools.pairwise(arrivals), key=lambda ends: ends[1] - ends[0])


async def _named(cluster: LocalCluster, victims: Sequence[str]) -> list[str]:
    """Resolve names of processes; `decode-serving` is the worker that computes the only stream."""
    if victims != ("decode-serving",):
        return list(victims)
    busiest = max(
        (view for view in cluster.workers if view.role is Role.DECODE), key=lambda view: _cpu_ticks(view.pid or 0)
    )
    return [busiest.name]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _kill(cluster: LocalCluster, names: Sequence[str]) -> None:
    pids = [view.pid for view in cluster.processes if view.name in names or view.role.value in names]
    if len(pids) != len(names) or None in pids:
        raise CannotMeasure(f"not all of {json.dumps(list(names))} are running")
    for pid in pids:
        os.kill(pid or 0, signal.SIGKILL)


async def _until_all_serve(cluster: LocalCluster) -> None:
    async with asyncio.timeout(_WAIT_S):
        for view in cluster.processes:
            await cluster.wait_ready(view.name)
