"""Ends workers at random moments under live streams: no stream may be lost, differ, or stand still for long."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from tests.proofs.kills.campaign import Workers, private_ranks, rank_pids
from tests.proofs.kills.table import quantile
from tests.proofs.streams.reader import Answer, ask
from tests.support.oracle import Oracle
from tests.support.running_cluster import body

NUM_STREAMS = 32
SHAPE: dict[str, Any] = {
    "prefill__replicas": 2,
    "decode__replicas": 3,
    "engine__num_blocks": 1600,
    # Too short for a stream to end in: the streams of a draining worker must continue elsewhere.
    "decode__drain_s": 0.3,
    # On a slow and busy machine they wait, and are not refused.
    "router__max_queue_s": 600.0,
    "router__request_timeout_s": 3600.0,
}
_TOKENS = (100, 350)
_REST_S = 0.4
_SETTLED_S = 3.0
"""A pause is attributed to a fault if it begins within this time of it."""


def ranked(prefill: int, decode: int) -> dict[str, Any]:
    """Return the shape of a cluster of workers of so many ranks, with one decode worker less, for there are more
    processes."""
    return SHAPE | private_ranks(prefill, decode) | {"decode__replicas": 2}


class Fault(Enum):
    """How a worker ends."""

    KILL = "kill -9"
    FREEZE = "frozen"
    """Stopped, and killed once it was given up."""
    THAW = "frozen, thawed"
    """Stopped, and let go on once it was given up: the same process comes back, to a router that went on without it."""
    DRAIN = "drain"
    RANK = "kill -9 of a rank"
    """Of another than the first; a worker ends without it."""

    @property
    def signal(self) -> signal.Signals:
        """What it begins with."""
        if self in {Fault.FREEZE, Fault.THAW}:
            return signal.SIGSTOP
        return signal.SIGTERM if self is Fault.DRAIN else signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    fault: Fault
    victim: str
    at_s: float


@dataclass(slots=True)
class Report:
    """What a campaign came to."""

    num_streams: int
    injected: list[InjectedFault] = field(default_factory=list)
    num_answers: int = 0
    num_choices: int = 0
    num_continued: Mapping[str, float] = field(default_factory=dict)
    """Retries by reason, as the router counted them."""
    pauses_s: dict[Fault, list[float]] = field(default_factory=dict)
    """The longest pause of every choice that was running at a fault."""
    quiet_pauses_s: list[float] = field(default_factory=list)
    """The longest pause of choices without a fault."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A request and its undisturbed answer."""

    request: dict[str, Any]
    answer: Answer


async def learn(base_url: str, oracle: Oracle, count: int, *, seed: int) -> list[Known]:
    """Greedy, seeded, and n = 2 requests, answered while nothing is wrong; greedy ones as `transformers` does."""
    draw, known = random.Random(seed), []
    for number in range(count):
        prompt, length = oracle.story(70_000 + 100 * seed + number, draw.randrange(40, 700)), draw.randrange(*_TOKENS)
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.9, "seed": number},
            {"temperature": 0.7, "seed": 3, "n": 2},
        ]
        request = body(prompt, length, **kinds[number % len(kinds)])
        answer = await ask(base_url, request)
        assert answer.problem is None, answer.problem
        assert answer.is_counted
        assert answer.usage is not None
        assert answer.usage["prompt_tokens"] == len(prompt)
        if number % len(kinds) == 0:
            assert answer.token_ids[0] == oracle.tokens(prompt, length)
        known.append(Known(request=request, answer=answer))
    return known


class Campaign:
    """One cluster, and a number of streams at any time."""

    def __init__(self, workers: Workers, known: Sequence[Known], *, seed: int, num_streams: int = NUM_STREAMS) -> None:
        self._num_streams = num_streams
        self.report = Report(num_streams=num_streams)
        self._workers = workers
        self._known = known
        self._draw = random.Random(seed)
        self._stopping = False
        self._serial = 0
        self._answers: list[Answer] = []

    async def run(self, faults: Mapping[Fault, int]) -> Report:
        """So many of each kind, in random order."""
        report, started_s = self.report, time.monotonic()
        order = [fault for fault, count in faults.items() for _ in range(count)]
        self._draw.shuffle(order)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._num_streams):
                tasks.create_task(self._stream_on())
            await self._workers.cluster.until(self._is_loaded)
            for fault in order:
                if report.problems:
                    break
                await self._inject(fault)
            self._stopping = True
        cluster = self._workers.cluster
        await cluster.until_idle()
        reasons = await cluster.figures("tandem_dispatch_retries_total")
        report.num_continued = {reason[0]: count for reason, count in reasons.items()}
        report.seconds = time.monotonic() - started_s
        report.problems += await self._workers.leftovers()
        self._reckon()
        return report

    async def _is_loaded(self) -> bool:
        """Whether most streams receive tokens: one that has ended takes a moment to be followed by another."""
        streaming = await self._workers.cluster.figure("vllm:num_requests_running")
        return streaming > self._num_streams / 2 or bool(self.report.problems)

    async def _stream_on(self) -> None:
        while not self._stopping and not self.report.problems:
            known = self._draw.choice(self._known)
            self._serial += 1
            answer = await ask(self._workers.cluster.local.http_url, known.request)
            self.report.num_answers += 1
            self._answers.append(answer)
            if answer.problem is not None:
                self.report.problems.append(answer.problem)
            elif not answer.same_as(known.answer):
                self.report.problems.append(f"another answer to request {self._serial}")

    async def _inject(self, fault: Fault) -> None:
        workers, draw = self._workers, self._draw
        victim = draw.choice(workers.names)
        pid, old_pid = (await workers.look(victim))["pid"], workers.cluster.pid(victim)
        struck = draw.choice(rank_pids(pid)) if fault is Fault.RANK else pid
        await asyncio.sleep(draw.uniform(0.0, _REST_S))
        self.report.injected.append(InjectedFault(fault=fault, victim=victim, at_s=time.monotonic()))
        os.kill(struck, fault.signal)
        if fault.signal is signal.SIGSTOP:
            await workers.cluster.until(lambda: self._gone(victim))
            os.kill(pid, signal.SIGKILL if fault is Fault.FREEZE else signal.SIGCONT)
        if fault is Fault.THAW:
            await workers.cluster.until(lambda: workers.is_here(victim))
        else:
            await workers.come_back(victim, old_pid)
        await asyncio.sleep(_REST_S)

    async def _gone(self, victim: str) -> bool:
        return not await self._workers.is_here(victim)

    def _reckon(self) -> None:
        report = self.report
        for answer in self._answers:
            for came_s in answer.came_s.values():
                report.num_choices += 1
                hit = [s for s in report.injected if came_s[0] - _SETTLED_S < s.at_s < came_s[-1]]
                gaps = [(later - former, former) for former, later in pairwise(came_s)]
                if not hit:
                    report.quiet_pauses_s.append(max(gap for gap, _ in gaps[1:] or gaps))
                    continue
                for injected in hit:
                    # Pauses that begin before the fault and end after it, or begin soon after it.
                    near = [g for g, at_s in gaps[1:] if at_s + g > injected.at_s and at_s < injected.at_s + _SETTLED_S]
                    if near:
                        report.pauses_s.setdefault(injected.fault, []).append(max(near))


def lines(report: Report) -> Iterator[str]:
    """As people read it."""
    kinds = Counter(injected.fault.value for injected in report.injected)
    victims = Counter(injected.victim.partition("-")[0] for injected in report.injected)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield (
        f"{len(report.injected)} faults ({counts}; {dict(victims)}) under {report.num_streams} streams, "
        f"{report.seconds:.0f} s"
    )
    yield f"{report.num_answers} answers of {report.num_choices} choices; retries: {dict(report.num_continued)}"
    yield f"{'longest pause of a choice, ms':32}{'choices':>8}{'p50':>8}{'p99':>8}{'max':>8}"
    for name, values in [("without a fault", report.quiet_pauses_s)] + [
        (b.value, v) for b, v in report.pauses_s.items()
    ]:
        ordered = sorted(1e3 * value for value in values)
        if ordered:
            figures = "".join(f"{quantile(ordered, share):8.0f}" for share in (0.5, 0.99, 1.0))
            yield f"{name:32}{len(ordered):8}{figures}"
    yield from (f"WRONG: {problem}" for problem in report.problems)
