"""Ways to feed the real scheduler: as it is meant to be, and the handicapped ways of before, for comparison only.

A policy decides when requests are handed over and with which lengths; everything else, blocks, steps, model, is the
same engine. Tokens that a policy computes for nobody (padding, rows that wait for their batch) count as nothing.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.engine_bench.workload import Tokens
from engine.request import Batch, Request
from engine.runner import Runner
from engine.scheduler import Scheduler
from tandem.ids import BlockHash, RequestId
from tandem.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a workload."""

    prompt: Tokens
    num_tokens: int

    @property
    def length(self) -> int:
        """When it is complete."""
        return len(self.prompt) + self.num_tokens


def mixed_asks(
    rng: Random, count: int, *, vocab_size: int, prompt_tokens: tuple[int, int], mean_tokens: int, max_tokens: int
) -> tuple[Ask, ...]:
    """Prompts of even, answers of exponentially distributed length: most are short, a few are very long."""
    asks = []
    for _ in range(count):
        length = rng.randint(*prompt_tokens)
        num_tokens = min(max_tokens, max(4, round(rng.expovariate(1 / mean_tokens))))
        asks.append(Ask(prompt=tuple(rng.randrange(vocab_size) for _ in range(length)), num_tokens=num_tokens))
    return tuple(asks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a workload."""

    wall_s: float
    useful_tokens: int
    """Of answers, without padding."""
    kv_use: float
    """Tokens held over tokens that the memory set aside for them could hold, averaged over steps."""
    most_rows: int

    @property
    def tokens_per_s(self) -> float:
        """Useful ones."""
        return self.useful_tokens / self.wall_s


def continuous(asks: Sequence[Ask]) -> list[list[Ask]]:
    """Hand everything over; the scheduler fills rows as they come free."""
    return [list(asks)]


def static(asks: Sequence[Ask], batch_size: int) -> list[list[Ask]]:
    """Closed batches in order of arrival: the next starts when the longest answer of this one is over."""
    return [list(asks[i : i + batch_size]) for i in range(0, len(asks), batch_size)]


def padded(asks: Sequence[Ask], batch_size: int) -> list[list[Ask]]:
    """Closed batches, a rectangle each: every prompt as long as the longest, every row kept until the last is over."""
    return [
        _rectangle(
            batch,
            num_prompt_tokens=max(len(ask.prompt) for ask in batch),
            num_tokens=max(ask.num_tokens for ask in batch),
        )
        for batch in static(asks, batch_size)
    ]


def _rectangle(batch: Sequence[Ask], *, num_prompt_tokens: int, num_tokens: int) -> list[Ask]:
    return [Ask(prompt=_padding(ask, num_prompt_tokens), num_tokens=num_tokens) for ask in batch]


def _padding(ask: Ask, length: int) -> Tokens:
    # Not one token for all, or the prefix cache would make padding cheap.
    missing = length - len(ask.prompt)
    return (ask.prompt * (1 + missing // len(ask.prompt)))[:missing] + ask.prompt


def serve(
    scheduler: Scheduler, runner: Runner, batches: Sequence[Sequence[Ask]], *, reserved_tokens: int | None = None
) -> Served:
    """Run batch after batch of requests to their ends, each batch handed over at once.

    `reserved_tokens`: what a sequence's memory is taken to be, whatever it holds; None counts its blocks.
    `useful_tokens` counts all tokens asked for: a caller that padded its asks corrects it.
    """
    started_s = time.perf_counter()
    uses: list[float] = []
    most_rows = 0
    for number, asks in enumerate(batches):
        for i, ask in enumerate(asks):
            scheduler.add(_request(f"{number}-{i}", ask, arrival_s=i))
        while (batch := scheduler.schedule(time.perf_counter())) is not None:
            most_rows = max(most_rows, len(batch.items))
            uses.append(_kv_use(batch, scheduler.blocks.block_size, reserved_tokens))
            scheduler.commit(batch, runner.execute(batch))
    return Served(
        wall_s=time.perf_counter() - started_s,
        useful_tokens=sum(ask.num_tokens for asks in batches for ask in asks),
        kv_use=sum(uses) / len(uses),
        most_rows=most_rows,
    )


def _kv_use(batch: Batch, block_size: int, reserved_tokens: int | None) -> float:
    held = sum(item.start + item.num_tokens for item in batch.items)
    if reserved_tokens is not None:
        return held / (len(batch.items) * reserved_tokens)
    return held / (sum(len(item.request.block_table) for item in batch.items) * block_size)


def _request(name: str, ask: Ask, *, arrival_s: float) -> Request:
    return Request(
        request_id=RequestId(name),
        token_ids=array("i", ask.prompt),
        num_prompt_tokens=len(ask.prompt),
        params=SamplingParams(temperature=0.0, max_tokens=ask.num_tokens, ignore_eos=True),
        hash_root=BlockHash(b"baseline"),
        arrival_s=arrival_s,
    )
