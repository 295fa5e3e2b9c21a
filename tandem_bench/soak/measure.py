"""All of `python -m tandem_bench soak`: a whole cluster under a steady mixed load, and what each process grows by.

Two prefill workers, two decode workers, a router and `tandem up`, with a KV pool and a cache of tokenized conversations
small enough to be full after the warm-up, so that what is cached grows no further. The second worker of each pool is
killed in turn: its successor is a new process, and the others must forget it.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from random import Random

import psutil
from rich.console import Console

from tandem_bench.clusters import RunningCluster, Setup, process_name, running
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure, print_table
from tandem_bench.soak.growth import MB, Life, Sample
from tandem_bench.soak.load import SoakLoad

_WARM_UP_S = 330.0
"""A router's history of counters is full after five minutes."""
_VICTIMS = ("prefill_worker 1", "decode_worker 1")
_SETUP = Setup(
    mode="shm",
    num_threads=1,
    local_prefill_tokens=64,
    engine={"num_blocks": 512},
    model={"max_model_len": 2048},
    router={"tokenizer_cache_bytes": 1 << 18},
    more={"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "log_level": "warning"},
)


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows`. Raises CannotMeasure when the cluster does not start or nothing was served."""
    total_s = options.minutes * 60
    if options.samples is not None:
        try:
            options.samples.write_text("")
        except OSError as error:
            raise CannotMeasure(f"--samples {options.samples}: {error.strerror}") from None
    async with running(_SETUP) as cluster:
        watch = _Watch(total_s)
        load = SoakLoad(cluster.url, rate=options.rate, rng=Random(options.seed))
        sending = asyncio.create_task(load.run())
        try:
            await _soak(cluster, watch, sending, kill_every_s=options.kill_every, err=err)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
    rows += watch.rows()
    rows += _load_rows(load, total_s)
    if options.samples is not None:
        options.samples.write_text(watch.samples())
    print_table(out, rows)
    for reason, count in load.failures.most_common(10):
        out.print(f"failed {count} times: {reason}", soft_wrap=True)
    if not load.served:
        raise CannotMeasure("no request was served")


async def _soak(
    cluster: RunningCluster, watch: "_Watch", sending: asyncio.Task[None], *, kill_every_s: float, err: Console
) -> None:
    """Watch the processes and kill workers until the time is over. Raises CannotMeasure when the load ends before."""
    due_kill_s, victims = time.monotonic() + kill_every_s, 0
    while not watch.is_over:
        await asyncio.sleep(watch.period_s)
        if sending.done():
            raise CannotMeasure("the load has ended") from sending.exception()
        await asyncio.to_thread(watch.sample, cluster.pids)
        if time.monotonic() >= due_kill_s and watch.has_time_for(kill_every_s):
            due_kill_s += kill_every_s
            name = _VICTIMS[victims % len(_VICTIMS)]
            victims += 1
            watch.kill(name)
            err.print(f"[dim]{watch.elapsed_s / 60:.1f} min: killed {name}[/dim]")


def _load_rows(load: SoakLoad, total_s: float) -> Iterable[Row]:
    num_served = load.served.total()
    yield figure("requests served", num_served, "")
    yield figure("requests served per second", num_served / total_s, "1/s")
    for kind, count in sorted(load.served.items()):
        yield figure(f"served: {kind}", count, "")
    yield figure("requests left out: too many in flight", load.num_left_out, "")
    yield figure("requests cancelled at the end", load.num_cancelled, "")
    yield figure("requests failed", load.failures.total(), "", at_most=0)
    yield figure("requests sent of which nothing is known", load.num_unaccounted, "", at_most=0)


class _Watch:
    """Samples every process of the cluster."""

    def __init__(self, total_s: float) -> None:
        self._begun_s = time.monotonic()
        self._total_s = total_s
        self.period_s = min(10.0, max(0.5, total_s / 500))
        self._warm_up_s = min(max(_WARM_UP_S, total_s / 6), total_s / 2)
        self._lives: dict[int, Life] = {}
        self._num_killed = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def is_over(self) -> bool:
        return self.elapsed_s >= self._total_s

    def has_time_for(self, wait_s: float) -> bool:
        """Whether there is as much time left."""
        return self._total_s - self.elapsed_s > wait_s / 2

    def sample(self, pids: Iterable[int]) -> None:
        """Measure the started processes and all their children."""
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    self._sample_one(process)

    def _sample_one(self, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            name = process_name(process.cmdline())
            if name is None:
                return
            memory = process.memory_info()
            life = self._lives.setdefault(process.pid, Life(name=name, pid=process.pid))
            life.samples.append(
                Sample(
                    at_s=time.monotonic(),
                    own_bytes=memory.rss - memory.shared,
                    shared_bytes=memory.shared,
                    num_files=process.num_fds(),
                    num_threads=process.num_threads(),
                )
            )

    def kill(self, name: str) -> None:
        """Kill the process of this name that was sampled last. Raises CannotMeasure when there is none."""
        lives = [life for life in self._lives.values() if life.name == name]
        if not lives:
            raise CannotMeasure(f"there is no {name}")
        with suppress(ProcessLookupError):
            os.kill(max(lives, key=lambda life: life.samples[-1].at_s).pid, signal.SIGKILL)
            self._num_killed += 1

    def samples(self) -> str:
        """Return all samples, a line each."""
        lines = ["process\tid\tseconds\town_mb\tshared_mb\topen_files\tthreads\n"]
        lines += [
            f"{life.name}\t{life.pid}\t{one.at_s - self._begun_s:.1f}\t{one.own_bytes / MB:.3f}"
            f"\t{one.shared_bytes / MB:.3f}\t{one.num_files}\t{one.num_threads}\n"
            for life in self._lives.values()
            for one in life.samples
        ]
        return "".join(lines)

    def rows(self) -> Iterable[Row]:
        """Figures of every process that lived for long enough. Raises CannotMeasure when there is none."""
        least_s = (self._total_s - self._warm_up_s) / 2
        lives = self._lives.values()
        rows = [row for life in lives for row in life.rows(warm_up_s=self._warm_up_s, least_s=least_s)]
        if not rows:
            raise CannotMeasure("no process lived long enough to be judged")
        return [*rows, figure("workers killed", self._num_killed, "")]
