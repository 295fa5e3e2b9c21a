"""Cuts the network between any two machines and ends machines, while clients stream through both routers.

No answer may be lost or differ, and nobody who is gone may be seen once Redis has let its lease end.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from redis.exceptions import RedisError

from tandem.client.aio import AsyncClient
from tandem.client.options import Options
from tandem.errors import ServingError
from tests.containers.nodes import ROUTERS, WORKERS, Nodes, View
from tests.proofs.kills.table import quantile
from tests.support.oracle import Oracle

NUM_STREAMS = 6
_TOKENS = (40, 150)
_PATIENCE_S = 600.0
"""For what must happen, however slow the machine is; a stream that takes longer counts as lost."""
_MAX_PROBLEMS = 5
_NUM_BY_ORACLE = 3
_LONG_S = 5.0
"""Pauses beyond this are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Between two machines, for so long."""

    one: str
    other: str
    seconds: float

    def __str__(self) -> str:
        return f"cut {self.one} | {self.other} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Of one machine; another one takes its name and its work."""

    name: str
    silently: bool

    def __str__(self) -> str:
        return f"{'silent death' if self.silently else 'death'} of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A prompt and the tokens of its undisturbed answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Report:
    """What a campaign came to."""

    blows: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    longest_pauses_s: list[float] = field(default_factory=list)
    ghosts_gone_s: list[float] = field(default_factory=list)
    """From a machine's death until a router's view was without it."""
    leases_ended_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def learn(nodes: Nodes, oracle: Oracle, count: int, *, seed: int) -> list[Known]:
    """Prompts answered while nothing is wrong; the first ones as `transformers` answers them, too."""
    draw, known = random.Random(seed), []
    for number in range(count):
        prompt, length = oracle.story(90_000 + 100 * seed + number, draw.randrange(40, 600)), draw.randrange(*_TOKENS)
        answer, _ = await ask(nodes, number, prompt, length)
        assert len(answer) == length
        if number < _NUM_BY_ORACLE:
            assert answer == oracle.tokens(prompt, length)
        known.append(Known(prompt=prompt, answer=answer))
    return known


async def ask(nodes: Nodes, first: int, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
    """One stream through the routers, beginning at one of them: its tokens, and the longest pause between any two.

    Raises ServingError.
    """
    options = Options(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=_PATIENCE_S)
    token_ids: list[int] = []
    came_s, pause_s = time.monotonic(), 0.0
    async with AsyncClient(nodes.router_addresses(first), api_key=nodes.key, max_reconnects=16) as client:
        async for piece in client.stream(list(prompt), options):
            now_s = time.monotonic()
            came_s, pause_s = now_s, max(pause_s, now_s - came_s)
            token_ids += piece.token_ids
    return token_ids, pause_s


class Campaign:
    """One cluster, `NUM_STREAMS` streams at any time."""

    def __init__(self, nodes: Nodes, known: Sequence[Known], *, seed: int) -> None:
        self.report = Report()
        self._nodes = nodes
        self._known = known
        self._draw = random.Random(seed)
        self._stopping = False
        self._serial = 0
        self._began_s = 0.0

    async def run(self, blows: Sequence[Cut | Death]) -> Report:
        """In random order, one at a time; after each the cluster becomes whole again."""
        order = self._draw.sample(blows, len(blows))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_STREAMS):
                tasks.create_task(self._stream_on())
            for blow in order:
                if self._is_over:
                    break
                await asyncio.sleep(self._draw.uniform(0.2, 1.0))
                self.report.blows.append(str(blow))
                self._began_s = time.monotonic()
                print(blow, flush=True)
                await (self._cut(blow) if isinstance(blow, Cut) else self._end(blow))
                await self.until_whole(str(blow))
            self._stopping = True
        await self._until_idle()
        return self.report

    @property
    def _is_over(self) -> bool:
        return self._stopping or len(self.report.problems) >= _MAX_PROBLEMS

    def _when(self) -> str:
        if not self.report.blows:
            return "before all blows"
        return f"{time.monotonic() - self._began_s:.1f} s into: {self.report.blows[-1]}"

    async def _stream_on(self) -> None:
        while not self._is_over:
            known = self._draw.choice(self._known)
            self._serial += 1
            serial = self._serial
            try:
                token_ids, pause_s = await ask(self._nodes, serial, known.prompt, len(known.answer))
            except ServingError as error:
                self._problem(f"answer {serial} was lost: {type(error).__name__}: {error}")
                continue
            self.report.num_answers += 1
            self.report.num_tokens += len(token_ids)
            self.report.longest_pauses_s.append(pause_s)
            if pause_s > _LONG_S:
                print(f"answer {serial} stood still for {pause_s:.1f} s; now {self._when()}", flush=True)
            if token_ids != known.answer:
                self._problem(f"answer {serial} differs: {len(token_ids)} tokens for {len(known.answer)}")

    async def _cut(self, blow: Cut) -> None:
        await asyncio.to_thread(self._nodes.cut, blow.one, blow.other)
        await asyncio.sleep(blow.seconds)
        await asyncio.to_thread(self._nodes.heal, blow.one, blow.other)

    async def _end(self, blow: Death) -> None:
        nodes = self._nodes
        leases = await nodes.leases()
        nodes.kill(blow.name, silently=blow.silently)
        if blow.name != "redis":
            await self._until_forgotten(blow, leases)
        await asyncio.to_thread(nodes.start, blow.name)

    async def _until_forgotten(self, blow: Death, leases: set[str]) -> None:
        """The last of a machine is its lease in Redis: whoever sees it then sees a ghost."""
        began_s = time.monotonic()
        num_left = len(leases) - 1
        seeing = {name for name in ROUTERS if name != blow.name}
        while seeing:
            has_ended = len(await self._nodes.leases()) <= num_left
            if has_ended:
                self.report.leases_ended_s.append(time.monotonic() - began_s)
            for router in sorted(seeing):
                view = await self._nodes.view(router)
                if blow.name in view.workers or (blow.name in ROUTERS and view.num_other_routers):
                    continue
                seeing.discard(router)
                self.report.ghosts_gone_s.append(time.monotonic() - began_s)
            if has_ended and seeing:
                self._problem(f"{blow}: a ghost at {', '.join(sorted(seeing))} when its lease had ended")
                return
            await asyncio.sleep(0.05)

    async def until_whole(self, after: str) -> None:
        """Until both routers see all workers, and each other."""
        lacking = "nothing was asked"
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while lacking:
                    if ended := await asyncio.to_thread(self._nodes.ended):
                        self._problem(f"{after}: ended: {'; '.join(ended)}")
                        self._stopping = True
                        return
                    lacking = "; ".join([text for router in ROUTERS if (text := await self._lacking(router))])
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self._problem(f"{after}: not whole again: {lacking}")
            self._stopping = True

    async def _lacking(self, router: str) -> str:
        try:
            view = await self._nodes.view(router)
        except (httpx.HTTPError, RedisError) as error:
            return f"{router} does not answer: {type(error).__name__}"
        absent = sorted(set(WORKERS) - view.workers.keys())
        told = [f"{router} does not see {', '.join(absent)}"] if absent else []
        if view.num_other_routers != 1:
            told.append(f"{router} sees {view.num_other_routers} other routers")
        return "; ".join(told)

    async def _until_idle(self) -> None:
        """Until nobody holds anything any more."""
        busy: list[str] = []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    busy = [f"{router}: {one}" for router in ROUTERS for one in held(await self._nodes.view(router))]
                    if not busy:
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self._problem(f"not idle: {busy}")

    def _problem(self, text: str) -> None:
        print("WRONG:", text, flush=True)
        self.report.problems.append(text)


def held(view: View) -> Iterator[str]:
    """What workers hold, though nobody asks them for anything."""
    for name, worker in view.workers.items():
        for count in ("used_blocks", "quarantined_blocks", "running", "waiting", "backlog_tokens"):
            if worker[count]:
                yield f"{name} has {worker[count]} {count}"


def lines(report: Report) -> Iterator[str]:
    """As people read it."""
    kinds = Counter(blow.partition(" ")[0] for blow in report.blows)
    yield f"{len(report.blows)} blows {dict(kinds)} under {NUM_STREAMS} streams"
    yield f"{report.num_answers} answers, {report.num_tokens} tokens"
    for name, values in (
        ("longest pause of an answer", report.longest_pauses_s),
        ("a machine's lease in Redis ended after", report.leases_ended_s),
        ("a router no longer saw it after", report.ghosts_gone_s),
    ):
        if ordered := sorted(values):
            figures = ", ".join(f"{label} {quantile(ordered, share):.2f}" for label, share in _SHARES.items())
            yield f"{name}, s: {figures}"
    yield from (f"WRONG: {problem}" for problem in report.problems)


_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
