"""Second turn of a conversation on a worker without its cache: fetching from a peer, compared with computing again.

After the first turn the prefill worker is killed and replaced by an empty one. Only the decode worker has the
conversation so far; the new prefill worker fetches it from there. A new prompt of the same length, sent next, shows the
cost of computing.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import TypeVar

import psutil

from tandem_bench.client import Client
from tandem_bench.clusters import RunningCluster, Setup, running
from tandem_bench.errors import CannotMeasure
from tandem_bench.make_model import cached_model
from tandem_bench.prompts import Prompt, random_prompt
from tandem_bench.report import Row, figure
from tandem_bench.shapes import REFERENCE, SHAPES

T = TypeVar("T")
TURN_TOKENS = (512, 1024, 2048)
TRANSPORTS = ("shm", "tcp")
_ROUNDS = 4
_ANSWER_TOKENS = 65
_NEXT_TOKENS = 64
_WARM_TOKENS = 256
_NUM_BLOCKS = 640
_WAIT_S = 60.0
_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Second turn, and a new prompt of the same length."""

    turn_tokens: int
    """Tokens of the first turn's prompt."""
    num_tokens: int
    """Tokens of the second turn's prompt."""
    pulled_tokens: int
    pulled_s: float
    computed_s: float
    """Times to the first token."""


async def rows(note: Callable[[str], None], *, shape: str = REFERENCE) -> list[Row]:
    """Measure each transport and length; `note` gets a line for every turn. Raises CannotMeasure."""
    model = cached_model(SHAPES[shape], note=note)
    found: list[Row] = []
    for transport in TRANSPORTS:
        setup = Setup(
            mode=transport,
            dtype="bfloat16",
            local_prefill_tokens=0,
            model={"path": str(model), "max_model_len": max(TURN_TOKENS) + 512},
            engine={"num_blocks": _NUM_BLOCKS},
        )
        async with running(setup) as cluster, Client(cluster.url) as client:
            talk = _Talk(cluster, client, SHAPES[shape].vocab_size)
            turns: list[Turn] = []
            for _ in range(_ROUNDS):
                turns += (newest := await talk.round())
                for turn in newest:
                    note(f"{transport} {_describe(turn)}")
        found += pull_rows(transport, turns)
    return found


def pull_rows(transport: str, turns: Sequence[Turn]) -> list[Row]:
    """Return medians by length. Raises CannotMeasure for a turn that fetched nothing, as nothing was compared then."""
    result: list[Row] = []
    for length in dict.fromkeys(turn.turn_tokens for turn in turns):
        seen = [turn for turn in turns if turn.turn_tokens == length]
        if any(not turn.pulled_tokens for turn in seen):
            raise CannotMeasure(f"{transport}: turn two of {length} tokens was computed, not fetched")
        name = f"pull.{transport}.{length}"
        pulled, computed = (median(getattr(turn, what) for turn in seen) for what in ("pulled_s", "computed_s"))
        result += [
            figure(f"{name}.tokens", median(turn.pulled_tokens for turn in seen), f"brought, of {seen[0].num_tokens}"),
            figure(f"{name}.ttft", 1000 * pulled, "ms where they were brought"),
            figure(f"{name}.computed", 1000 * computed, "ms where all was computed"),
            figure(f"{name}.gain", computed / pulled, f"x sooner; {len(seen)} turns"),
        ]
    return result


class _Talk:
    """Conversations with one cluster, one after another."""

    def __init__(self, cluster: RunningCluster, client: Client, vocab_size: int) -> None:
        self._cluster, self._client, self._vocab_size = cluster, client, vocab_size
        self._rng = Random("bench:transfer:pull")

    async def round(self) -> list[Turn]:
        """Run one new conversation of each length. Raises CannotMeasure."""
        await self._warm()
        firsts = [self._prompt(length) for length in TURN_TOKENS]
        said = [await self._client.complete(first, max_tokens=_ANSWER_TOKENS) for first in firsts]
        await self._replace_prefill_worker()
        await self._warm()
        return [await self._second(first, answer.token_ids) for first, answer in zip(firsts, said, strict=True)]

    async def _second(self, first: Prompt, said: Sequence[int]) -> Turn:
        next_tokens = self._prompt(_NEXT_TOKENS).token_ids
        second = replace(first, token_ids=(*first.token_ids, *said, *next_tokens))
        before = await self._fetched()
        pulled = await self._client.complete(second, max_tokens=2)
        after = await self._until(self._fetched, lambda now: now > before)
        computed = await self._client.complete(self._prompt(len(second.token_ids)), max_tokens=2)
        return Turn(
            turn_tokens=len(first.token_ids),
            num_tokens=len(second.token_ids),
            pulled_tokens=round(after - before),
            pulled_s=pulled.first_token_s,
            computed_s=computed.first_token_s,
        )

    def _prompt(self, length: int) -> Prompt:
        return random_prompt(self._rng, length, self._vocab_size)

    async def _warm(self) -> None:
        """Let the prefill worker compute: one that knows no rate of its own fetches nothing."""
        await self._client.complete(self._prompt(_WARM_TOKENS), max_tokens=2)

    async def _fetched(self) -> float:
        return sum(value for _, value in await self._client.samples("tandem_worker_prefix_fetched_tokens_total"))

    async def _replace_prefill_worker(self) -> None:
        os.kill(_prefill_pid(self._cluster.pids), signal.SIGKILL)
        await self._until(self._num_live, lambda live: not live)
        await self._until(self._num_live, lambda live: live > 0)

    async def _num_live(self) -> float:
        return sum(v for _, v in await self._client.samples("tandem_workers", role="prefill", state="live"))

    async def _until(self, read: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
        """Return what is read once it meets the condition. Raises CannotMeasure."""
        deadline_s = time.monotonic() + _WAIT_S
        while not holds(value := await read()):
            if time.monotonic() > deadline_s:
                raise CannotMeasure(f"the router still says {value} after {_WAIT_S:.0f} s")
            # The metrics of another process give no event to wait for.
            await asyncio.sleep(_PERIOD_S)
        return value


def _prefill_pid(roots: Sequence[int]) -> int:
    """Return the pid of the prefill worker among a cluster's processes. Raises CannotMeasure."""
    for root in roots:
        for process in psutil.Process(root).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if "prefill_worker" in process.cmdline():
                    return process.pid
    raise CannotMeasure("found no process of the prefill worker")


def _describe(turn: Turn) -> str:
    return (
        f"{turn.turn_tokens}: {turn.pulled_tokens} of {turn.num_tokens} tokens fetched, first token after "
        f"{1000 * turn.pulled_s:.0f} ms; computed {1000 * turn.computed_s:.0f} ms"
    )
