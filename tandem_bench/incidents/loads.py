"""The loads of the incidents, and the latencies that their clients saw."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from tandem_bench.client import Client, Completion
from tandem_bench.prompts import Prompt, random_prompt

VOCABULARY = 2048
"""Vocabulary of the built-in model."""


async def keep_asking(
    client: Client, prompts: Callable[[], Prompt], *, max_tokens: int, streams: int, seconds: float
) -> list[Completion]:
    """Run so many clients with one request at a time each, until the time is over; wait for the last answers."""
    end_s = time.monotonic() + seconds
    found: list[Completion] = []

    async def one() -> None:
        while time.monotonic() < end_s:
            found.append(await client.complete(prompts(), max_tokens=max_tokens))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(one())
    return found


def new_prompts(seed: str, length: int) -> Callable[[], Prompt]:
    """Return a source of new prompts of one length."""
    rng = Random(f"incident:{seed}")
    return lambda: random_prompt(rng, length, VOCABULARY)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def seen(found: Sequence[Completion], who: str = "") -> Mapping[str, float]:
    """Return times to first token and gaps, in milliseconds."""
    first = [one.first_token_s for one in found]
    gaps = [gap for one in found for gap in one.gaps_s]
    return {
        f"{who}answers": float(len(found)),
        f"{who}TTFT p50 (ms)": 1e3 * percentile(first, 0.5),
        f"{who}TTFT p95 (ms)": 1e3 * percentile(first, 0.95),
        f"{who}ITL p50 (ms)": 1e3 * percentile(gaps, 0.5),
        f"{who}ITL p99 (ms)": 1e3 * percentile(gaps, 0.99),
    }


async def long_contexts(url: str, seconds: float) -> Mapping[str, float]:
    """Run twelve conversations whose prompts and answers together far exceed a small pool."""
    async with Client(url) as client:
        prompts = new_prompts("memory", 200)
        return seen(await keep_asking(client, prompts, max_tokens=800, streams=12, seconds=seconds))


async def chats_and_documents(url: str, seconds: float) -> Mapping[str, float]:
    """Run four chats that stream, and six clients that send a document and request one line."""
    async with Client(url) as client, asyncio.TaskGroup() as tasks:
        chats = tasks.create_task(
            keep_asking(client, new_prompts("chats", 32), max_tokens=200, streams=4, seconds=seconds)
        )
        documents = tasks.create_task(
            keep_asking(client, new_prompts("documents", 2000), max_tokens=8, streams=6, seconds=seconds)
        )
    return {**seen(chats.result(), "chats: "), "documents: answers": float(len(documents.result()))}


async def short_and_long(url: str, seconds: float) -> Mapping[str, float]:
    """Run two clients with short questions and four with long prompts; latencies of both are reported separately."""
    async with Client(url) as client, asyncio.TaskGroup() as tasks:
        short = tasks.create_task(
            keep_asking(client, new_prompts("short", 40), max_tokens=16, streams=2, seconds=seconds)
        )
        long = tasks.create_task(
            keep_asking(client, new_prompts("long", 1900), max_tokens=4, streams=4, seconds=seconds)
        )
    return {**seen(short.result(), "short: "), **seen(long.result(), "long: ")}


async def chats(url: str, seconds: float) -> Mapping[str, float]:
    """Run two chats that stream."""
    async with Client(url) as client:
        return seen(await keep_asking(client, new_prompts("quality", 120), max_tokens=64, streams=2, seconds=seconds))
