"""The runs of the part `cluster`: three clusters, started at once through the command line, and what they answer."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tandem_bench.client import Client
from tandem_bench.clusters import COLOCATED, RunningCluster
from tandem_bench.errors import CannotMeasure, ClusterFailed
from tandem_bench.gpu.cluster.fleet import Fleet, Found, Step
from tandem_bench.gpu.cluster.load import Answers, Tokens, num_different, questions, send_prompts
from tandem_bench.gpu.cluster.plan import PAIRS, Plan, setups
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.make_model import write_model
from tandem_bench.report import Row, figure
from tandem_bench.shapes import SHAPES

_REPORTS_S = 5.0
"""Time within which what workers have counted reaches the router; their heartbeats are 0.25 s apart."""
_PERIOD_S = 0.05


def run(stage: Stage) -> Findings:
    """Run everything. Raises ClusterFailed, at the end, with the logs of what did not work; see `cluster.part`."""
    plan = Plan.of(stage)
    yield Note(name="cluster.model", text=f"{plan.shape}, random, {stage.dtype}, deterministic")
    with TemporaryDirectory(prefix="tandem-gpu-") as folder, asyncio.Runner() as runner:
        started_s = time.monotonic()
        write_model(Path(folder), SHAPES[plan.shape], dtype=stage.dtype, seed=stage.seed, device=stage.place)
        if stage.device == "cuda":
            torch.cuda.empty_cache()
        yield figure("cluster.model written", time.monotonic() - started_s, "s")
        on_device = "shm" if stage.is_small else "cuda_ipc"
        fleet = Fleet(stage)
        problems: list[str] = []

        def attempt(step: Coroutine[Any, Any, Found]) -> Iterator[Row | Note]:
            try:
                yield from runner.run(step)
            except CannotMeasure as problem:
                problems.append(str(problem))

        try:
            yield from runner.run(fleet.start(setups(stage, plan, Path(folder), on_device)))
            problems += fleet.failures
            if COLOCATED in fleet.clusters:
                expected = Expected(plan, stage)
                yield from attempt(fleet.use(COLOCATED, expected.learn))
                for name, step in _steps(on_device, plan, expected) if expected.tokens else ():
                    if fleet.left_s <= 0:
                        problems.append("no time was left for the rest")
                        break
                    if name in fleet.clusters:
                        yield from attempt(fleet.use(name, step))
            yield from fleet.complaints()
        finally:
            runner.run(fleet.stop())
    if problems:
        raise ClusterFailed("\n\n".join(problems))


class Expected:
    """The questions, and the tokens that every cluster must answer with."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        rng = Random(f"cluster:{stage.seed}")
        self.asked = questions(rng, plan.many, lengths=plan.lengths, vocab_size=SHAPES[plan.shape].vocab_size)
        self.tokens: list[Tokens] = []
        self._plan = plan

    async def learn(self, _cluster: RunningCluster, client: Client) -> Found:
        """Have the colocated cluster answer everything. Raises ClusterFailed unless it does."""
        plan = self._plan
        answers = await send_prompts(
            client, self.asked, num_tokens=plan.long_tokens, concurrency=plan.few, salt="expected"
        )
        if answers.errors:
            raise ClusterFailed(f"{len(answers.errors)} requests failed, the first: {answers.errors[0]}")
        self.tokens = [tokens for tokens in answers.tokens if tokens is not None]
        return [
            # Answers that are alike would be equal on any cluster.
            figure("cluster.colocated: distinct answers", len(set(self.tokens)), "", at_least=plan.many),
            figure("cluster.colocated: output", answers.tokens_per_s, "tokens/s"),
        ]

    def judge(self, name: str, answers: Answers, num_tokens: int) -> Found:
        """Compare what another cluster has answered."""
        different = num_different(answers.tokens, self.tokens, num_tokens)
        found: Found = [
            figure(f"{name}: failed", len(answers.errors), "requests", at_most=0),
            figure(f"{name}: different", different, "answers", at_most=0),
        ]
        if answers.errors:
            found.append(Note(name=f"{name}: first error", text=answers.errors[0][:1000]))
        return found


def _steps(on_device: str, plan: Plan, expected: Expected) -> Iterator[tuple[str, Step]]:
    """Yield what is done after the expected answers are known, and with which cluster."""

    def streams(transport: str, count: int) -> tuple[str, Step]:
        return transport, lambda _cluster, client: _streams(transport, client, plan, expected, count)

    def kill(victim: str) -> tuple[str, Step]:
        return on_device, lambda cluster, client: _kill(on_device, cluster, client, plan, expected, victim)

    yield from (streams(on_device, plan.few), streams(on_device, plan.many), kill("decode"), kill("prefill"))
    # Meanwhile the killed workers are replaced.
    yield streams("tcp", plan.few)
    yield on_device, lambda _cluster, client: _restored(on_device, client, plan, expected)


async def _streams(transport: str, client: Client, plan: Plan, expected: Expected, count: int) -> Found:
    """Serve so many streams at once, after a round that compiles what is not compiled yet."""
    name = f"cluster.{transport}.{count}"
    asked = expected.asked[:count]
    start = await _reported(client, transport, at_least=0)
    warm = await send_prompts(client, asked, num_tokens=plan.num_tokens, concurrency=count, salt=f"{name} first")
    before = await _reported(client, transport, at_least=start.count + count)
    answers = await send_prompts(client, asked, num_tokens=plan.num_tokens, concurrency=count, salt=name)
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
    transport: str, cluster: RunningCluster, client: Client, plan: Plan, expected: Expected, victim: str
) -> Found:
    """Kill the first of the two workers of the pool `victim` while it serves.

    A decode worker dies when an eighth of all tokens have arrived (later it might have sent everything to a client that
    reads slowly), a prefill worker at the first token, when the other prompts are being computed or handed over.
    """
    name = f"cluster.{transport}.kill {victim}"
    is_decode = victim == "decode"
    num_tokens = plan.long_tokens if is_decode else plan.num_tokens
    asked = expected.asked[: plan.few] if is_decode else expected.asked
    await _until_live(client, victim, PAIRS)
    pid = cluster.pid_of(f"{victim}_worker 0")
    left = len(asked) * num_tokens // 8 if is_decode else 1

    def on_tokens(count: int) -> None:
        nonlocal left
        is_due = 0 < left <= count
        left -= count
        if is_due:
            os.kill(pid, signal.SIGKILL)

    retries = sum((await client.counts("tandem_dispatch_retries_total")).values())
    lost = (await client.counts("tandem_workers_lost_total")).get(victim, 0.0)
    answers = await send_prompts(
        client, asked, num_tokens=num_tokens, concurrency=plan.few, salt=name, on_tokens=on_tokens
    )
    retries = sum((await client.counts("tandem_dispatch_retries_total")).values()) - retries
    lost = (await client.counts("tandem_workers_lost_total")).get(victim, 0.0) - lost
    return [
        *expected.judge(name, answers, num_tokens),
        figure(f"{name}: workers lost", lost, "", at_least=1),
        # Which prompts the prefill worker was computing at that moment is chance; it may have been none.
        figure(f"{name}: requests moved", retries, "", at_least=1 if is_decode else None),
        figure(f"{name}: longest gap between tokens", answers.longest_gap_s, "s"),
    ]


async def _restored(transport: str, client: Client, plan: Plan, expected: Expected) -> Found:
    """Wait for the successors of the killed workers, and ask once more."""
    name = f"cluster.{transport}.restored"
    started_s = time.monotonic()
    for role in ("prefill", "decode"):
        await _until_live(client, role, PAIRS)
    waited = figure(f"{name}: waited for workers", time.monotonic() - started_s, "s")
    asked = expected.asked[: plan.few]
    answers = await send_prompts(client, asked, num_tokens=plan.num_tokens, concurrency=plan.few, salt=name)
    return [waited, *expected.judge(name, answers, plan.num_tokens)]


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


async def _until_live(client: Client, role: str, count: int) -> None:
    """Wait until so many workers of a pool serve; the caller bounds the time."""
    while True:
        live = await client.samples("tandem_workers", role=role, state="live")
        if sum(value for _, value in live) >= count:
            return
        await asyncio.sleep(_PERIOD_S)
