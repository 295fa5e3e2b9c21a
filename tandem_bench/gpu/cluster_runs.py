"""The runs of the part `cluster`: three clusters, started at once through the command line, and what they answer."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tandem_bench.client import Client
from tandem_bench.clusters import COLOCATED, START_S, RunningCluster, Setup, last_words, running
from tandem_bench.errors import CannotMeasure, ClusterFailed
from tandem_bench.gpu.cluster_load import Answers, Tokens, ask, num_different, questions
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.make_model import write_model
from tandem_bench.report import Row, figure
from tandem_bench.shapes import SHAPES

_SHAPE = "1b"
"""Shape on a GPU, unless another than the suite's default is chosen: seven workers hold a copy each."""
_MEMORY_BYTES = 9 << 30
"""Memory of each of the seven workers, which all together fit into 80 GB."""
_STOP_S = 12.0
"""Time left for stopping the clusters: whoever kills this process would leave them running."""
_REPORTS_S = 5.0
"""Time within which what workers have counted reaches the router; their heartbeats are 0.25 s apart."""
_PERIOD_S = 0.05
_PAIRS = 2
"""Workers of each pool in the cluster whose workers are killed."""
_Found = list[Row | Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Sizes of all runs."""

    shape: str
    few: int
    """Streams at once; in the second run with `many`."""
    many: int
    lengths: range
    """Lengths of prompts, in tokens."""
    num_tokens: int
    """Length of answers; `long_tokens` while a decode worker is killed."""
    long_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, stage: Stage) -> "_Plan":
        if stage.is_small:
            return cls(
                shape=stage.shape,
                few=4,
                many=8,
                lengths=range(60, 200),
                num_tokens=24,
                long_tokens=160,
                max_model_len=512,
            )
        return cls(
            shape=_SHAPE if stage.is_judged else stage.shape,
            few=16,
            many=64,
            lengths=range(256, 1024),
            num_tokens=128,
            long_tokens=384,
            max_model_len=2048,
        )


def run(stage: Stage) -> Findings:
    """Run everything. Raises ClusterFailed, at the end, with the logs of what did not work."""
    plan = _Plan.of(stage)
    yield Note(name="cluster.model", text=f"{plan.shape}, random, {stage.dtype}, deterministic")
    with TemporaryDirectory(prefix="tandem-gpu-") as folder, asyncio.Runner() as runner:
        started_s = time.monotonic()
        write_model(Path(folder), SHAPES[plan.shape], dtype=stage.dtype, seed=stage.seed, device=stage.place)
        if stage.device == "cuda":
            torch.cuda.empty_cache()
        yield figure("cluster.model written", time.monotonic() - started_s, "s")
        on_device = "shm" if stage.is_small else "cuda_ipc"
        fleet = _Fleet(stage)
        problems: list[str] = []

        def attempt(step: Coroutine[Any, Any, _Found]) -> Iterator[Row | Note]:
            try:
                yield from runner.run(step)
            except CannotMeasure as problem:
                problems.append(str(problem))

        try:
            yield from attempt(fleet.start(_setups(stage, plan, Path(folder), on_device)))
            if COLOCATED in fleet.clusters:
                expected = _Expected(plan, stage)
                yield from attempt(fleet.use(COLOCATED, expected.learn))
                for name in (on_device, "tcp"):
                    for step in _steps(name, plan, expected, kills=name == on_device):
                        if name in fleet.clusters and expected.tokens:
                            yield from attempt(fleet.use(name, step))
        finally:
            runner.run(fleet.stop())
    if problems:
        raise ClusterFailed("\n\n".join(problems))


def _setups(stage: Stage, plan: _Plan, model: Path, on_device: str) -> Mapping[str, Setup]:
    engine: dict[str, Any] = {"device": stage.device, "deterministic": True, "max_running_requests": plan.many}
    # The first steps may compile kernels, seven workers at once: that is not what a stalled engine is.
    engine |= {"num_blocks": 512} if stage.is_small else {"memory_bytes": _MEMORY_BYTES, "stall_s": 120.0}

    def setup(mode: str, replicas: int) -> Setup:
        pools = {} if mode == COLOCATED else {pool: {"replicas": replicas} for pool in ("prefill", "decode")}
        return Setup(
            mode=mode,
            dtype=stage.dtype,
            local_prefill_tokens=0,
            num_threads=1 if stage.is_small else None,
            model={"path": str(model), "name": "random", "max_model_len": plan.max_model_len},
            engine=engine,
            # A worker that stops need not wait for others to fetch its cache.
            more={"transfer": {"succession_s": 0.0}, **pools},
        )

    return {COLOCATED: setup(COLOCATED, 1), on_device: setup(on_device, _PAIRS), "tcp": setup("tcp", 1)}


class _Fleet:
    """The clusters, by name."""

    def __init__(self, stage: Stage) -> None:
        self.clusters: dict[str, RunningCluster] = {}
        self._stage = stage
        self._stacks: list[AsyncExitStack] = []

    async def start(self, setups: Mapping[str, Setup]) -> _Found:
        """Start all at once. Raises ClusterFailed for those that did not start; the others are kept."""
        self._stacks = [AsyncExitStack() for _ in setups]
        starts = [
            stack.enter_async_context(running(setup, patience_s=min(START_S, self._left_s)))
            for stack, setup in zip(self._stacks, setups.values(), strict=True)
        ]
        outcomes = dict(zip(setups, await asyncio.gather(*starts, return_exceptions=True), strict=True))
        self.clusters = {name: one for name, one in outcomes.items() if isinstance(one, RunningCluster)}
        failures = [f"{name}: {one}" for name, one in outcomes.items() if isinstance(one, BaseException)]
        if failures:
            raise ClusterFailed("\n\n".join(failures))
        return [figure(f"cluster.{name}.ready after", one.ready_s, "s") for name, one in self.clusters.items()]

    async def use(self, name: str, step: "_Step") -> _Found:
        """Take one step. Raises ClusterFailed, with the end of the cluster's log, for whatever goes wrong."""
        cluster = self.clusters[name]
        try:
            async with asyncio.timeout(self._left_s), Client(cluster.url) as client:
                found = await step(cluster, client)
        except Exception as problem:
            raise ClusterFailed(f"{name}: {problem!r:.2000}\n{last_words(cluster.log)}") from problem
        if any(row.met is False for row in found if isinstance(row, Row)):
            found.append(Note(name=f"cluster.{name}.log", text=last_words(cluster.log)))
        return found

    async def stop(self) -> None:
        await asyncio.gather(*(stack.aclose() for stack in self._stacks))

    @property
    def _left_s(self) -> float:
        return self._stage.left_s - _STOP_S


_Step = Callable[[RunningCluster, Client], Awaitable[_Found]]


class _Expected:
    """The questions, and the tokens that every cluster must answer with."""

    def __init__(self, plan: _Plan, stage: Stage) -> None:
        rng = Random(f"cluster:{stage.seed}")
        self.asked = questions(rng, plan.many, lengths=plan.lengths, vocab_size=SHAPES[plan.shape].vocab_size)
        self.tokens: list[Tokens] = []
        self._plan = plan

    async def learn(self, _cluster: RunningCluster, client: Client) -> _Found:
        """Have the colocated cluster answer everything. Raises ClusterFailed unless it does."""
        plan = self._plan
        answers = await ask(client, self.asked, num_tokens=plan.long_tokens, concurrency=plan.few, salt="expected")
        if answers.errors:
            raise ClusterFailed(f"{len(answers.errors)} requests failed, the first: {answers.errors[0]}")
        self.tokens = [tokens for tokens in answers.tokens if tokens is not None]
        return [
            # Answers that are alike would be equal on any cluster.
            figure("cluster.colocated: distinct answers", len(set(self.tokens)), "", at_least=plan.many),
            figure("cluster.colocated: output", answers.tokens_per_s, "tokens/s"),
        ]

    def judge(self, name: str, answers: Answers, num_tokens: int) -> _Found:
        """Compare what another cluster has answered."""
        different = num_different(answers.tokens, self.tokens, num_tokens)
        found: _Found = [
            figure(f"{name}: failed", len(answers.errors), "requests", at_most=0),
            figure(f"{name}: different", different, "answers", at_most=0),
        ]
        if answers.errors:
            found.append(Note(name=f"{name}: first error", text=answers.errors[0][:1000]))
        return found


def _steps(name: str, plan: _Plan, expected: _Expected, *, kills: bool) -> list[_Step]:
    """Return what is done with one cluster, in order."""

    def streams(count: int) -> _Step:
        return lambda _cluster, client: _streams(name, client, plan, expected, count)

    if not kills:
        return [streams(plan.few)]

    def kill(victim: str) -> _Step:
        return lambda cluster, client: _kill(f"cluster.{name}.kill {victim}", cluster, client, plan, expected, victim)

    return [streams(plan.few), streams(plan.many), kill("decode"), kill("prefill")]


async def _streams(transport: str, client: Client, plan: _Plan, expected: _Expected, count: int) -> _Found:
    """Serve so many streams at once, after a round that compiles what is not compiled yet."""
    name = f"cluster.{transport}.{count}"
    asked = expected.asked[:count]
    start = await _reported(client, transport, at_least=0)
    warm = await ask(client, asked, num_tokens=plan.num_tokens, concurrency=count, salt=f"{name} first")
    before = await _reported(client, transport, at_least=start.count + count)
    answers = await ask(client, asked, num_tokens=plan.num_tokens, concurrency=count, salt=name)
    after = await _reported(client, transport, at_least=before.count + count)
    moved = after.num_bytes - before.num_bytes
    return [
        *expected.judge(f"{name}.first", warm, plan.num_tokens),
        *expected.judge(name, answers, plan.num_tokens),
        figure(f"{name}: handed over", after.count - before.count, "prompts", at_least=count),
        figure(f"{name}: output", answers.tokens_per_s, "tokens/s"),
        figure(f"{name}: TTFT p50", answers.ttft_s * 1e3, "ms"),
        figure(f"{name}: exposed hand-off", answers.exposed_s * 1e3, "ms, mean"),
        figure(f"{name}: KV moved", moved / 1e9, "GB"),
        figure(f"{name}: KV rate of writes", moved / max(after.seconds - before.seconds, 1e-9) / 1e9, "GB/s"),
    ]


async def _kill(
    name: str, cluster: RunningCluster, client: Client, plan: _Plan, expected: _Expected, victim: str
) -> _Found:
    """Kill the first of the two workers of the pool `victim` while it serves.

    A decode worker dies when a third of all tokens have arrived, a prefill worker at the first token, when the other
    prompts are being computed or handed over.
    """
    is_decode = victim == "decode"
    num_tokens = plan.long_tokens if is_decode else plan.num_tokens
    asked = expected.asked[: plan.few] if is_decode else expected.asked
    await _until_live(client)
    pid = cluster.pid_of(f"{victim}_worker 0")
    left = len(asked) * num_tokens // 3 if is_decode else 1

    def on_tokens(count: int) -> None:
        nonlocal left
        is_due = 0 < left <= count
        left -= count
        if is_due:
            os.kill(pid, signal.SIGKILL)

    retries = sum((await client.counts("tandem_dispatch_retries_total")).values())
    lost = (await client.counts("tandem_workers_lost_total")).get(victim, 0.0)
    answers = await ask(client, asked, num_tokens=num_tokens, concurrency=plan.few, salt=name, on_tokens=on_tokens)
    retries = sum((await client.counts("tandem_dispatch_retries_total")).values()) - retries
    lost = (await client.counts("tandem_workers_lost_total")).get(victim, 0.0) - lost
    return [
        *expected.judge(name, answers, num_tokens),
        figure(f"{name}: workers lost", lost, "", at_least=1),
        # Which prompts the prefill worker was computing at that moment is chance; it may have been none.
        figure(f"{name}: requests moved", retries, "", at_least=1 if is_decode else None),
        figure(f"{name}: longest pause", answers.longest_pause_s, "s"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """Hand-offs of all workers since their start, as they have reported them to the router."""

    count: float
    """Those whose receivers committed them."""
    num_bytes: float
    seconds: float
    """Time that senders spent writing."""


async def _reported(client: Client, transport: str, *, at_least: float) -> _Reported:
    """Read the hand-offs over one transport, after waiting a little for a count."""
    deadline_s = time.monotonic() + _REPORTS_S
    while True:
        count = await _total(client, "tandem_worker_transfers_total", transport, "received")
        if count >= at_least or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_PERIOD_S)
    return _Reported(
        count=count,
        num_bytes=await _total(client, "tandem_worker_transfer_bytes_total", transport, "received"),
        seconds=await _total(client, "tandem_worker_transfer_seconds_total", transport, "sent"),
    )


async def _total(client: Client, metric: str, transport: str, direction: str) -> float:
    samples = await client.samples(
        metric, transport=transport, direction=direction, kind="handoff", outcome="committed"
    )
    return sum(value for _, value in samples)


async def _until_live(client: Client) -> None:
    """Wait until all workers of both pools serve; the caller bounds the time."""
    while True:
        live = [
            value
            for role in ("prefill", "decode")
            for _, value in await client.samples("tandem_workers", role=role, state="live")
        ]
        if len(live) == 2 and min(live) >= _PAIRS:
            return
        await asyncio.sleep(_PERIOD_S)
