"""Many adapters on a cluster whose workers hold a few each: where requests land, and how often adapters are loaded.

Requests draw their adapter by Zipf's law. What each worker holds is followed from the router's decisions in their
order: its last `resident` adapters, which is what a worker of that much memory keeps. Loads are the workers' own
counts, against those of one least-recently-used cache with the room of all workers of a pool, which no cluster has.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import torch
from rich.console import Console

from tandem_bench.adapters.files import packed_bytes, write_adapters
from tandem_bench.adapters.options import MAX_REQUESTS
from tandem_bench.client import Client
from tandem_bench.clusters import Setup, running
from tandem_bench.prompts import Prompt
from tandem_bench.report import Row, figure

MIN_LANDED_PERCENT = 95.0
MAX_LOADS_RATIO = 1.2
NUM_WORKERS = 2
"""Of each pool."""
_CONCURRENCY = 4
_PROMPT_TOKENS, _OUTPUT_TOKENS = 96, 8
_FIRST_ID, _LAST_ID = 16, 400
_POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """How the requests of one pool landed."""

    num_resident: int
    """Requests whose adapter some worker held."""
    num_landed: int
    """Those that were sent to such a worker."""


class LeastRecentlyUsed:
    """The last `room` names that were used."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def use(self, name: str) -> bool:
        """Use a name; returns whether it was there."""
        was_there = name in self._names
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._room:
            self._names.popitem(last=False)
        return was_there


def zipf_draws(names: Sequence[str], count: int, rng: Random) -> list[str]:
    """Draw names so that the n-th is as likely as 1 / n."""
    return rng.choices(names, weights=[1 / (place + 1) for place in range(len(names))], k=count)


def landing(placed: Iterable[tuple[str, str]], resident: int) -> Landing:
    """Follow requests, each an adapter and the worker that it was sent to, in order."""
    holders: dict[str, LeastRecentlyUsed] = {}
    num_resident = num_landed = 0
    for name, worker in placed:
        is_anywhere = any(name in holder for holder in holders.values())
        has_landed = holders.setdefault(worker, LeastRecentlyUsed(resident)).use(name)
        num_resident += is_anywhere
        num_landed += has_landed
    return Landing(num_resident=num_resident, num_landed=num_landed)


def num_misses(names: Iterable[str], room: int) -> int:
    """Number of loads of one cache."""
    cache = LeastRecentlyUsed(room)
    return sum(not cache.use(name) for name in names)


async def measure_landing(
    model: str, *, num_adapters: int, resident: int, num_requests: int, seed: int, err: Console
) -> list[Row]:
    """Run the cluster and the load. Raises RequestFailed and ClusterFailed."""
    with TemporaryDirectory(prefix="tandem-adapters-") as folder:
        paths = write_adapters(model, Path(folder), num_adapters)
        each = packed_bytes(model, next(iter(paths.values())), torch.float32)
        setup = Setup(
            mode="shm",
            num_threads=1,
            local_prefill_tokens=0,
            model={"path": model, "adapters": {name: str(path) for name, path in paths.items()}},
            engine={"adapter_bytes": resident * each},
            more={pool: {"replicas": NUM_WORKERS} for pool in _POOLS},
        )
        async with running(setup) as cluster:
            err.print(f"[dim]{num_requests} requests for {num_adapters} adapters ...[/dim]")
            names = zipf_draws(list(paths), num_requests, Random(seed))
            order = await _send(cluster.url, names, seed)
            placed = await _placements(cluster.url, order)
            loads, seconds = [await _total(cluster.url, name) for name in ("loads", "load_seconds")]
    rows = [row for pool in _POOLS for row in _rows(pool, placed, int(loads[pool]), resident)]
    return [*rows, figure("a load, on average", 1e3 * sum(seconds.values()) / sum(loads.values()), "ms")]


def _rows(pool: str, placed: Sequence[tuple[str, dict[str, str]]], num_loads: int, resident: int) -> list[Row]:
    found = landing([(name, workers[pool]) for name, workers in placed], resident)
    share = 100 * found.num_landed / max(1, found.num_resident)
    least = num_misses((name for name, _ in placed), resident * NUM_WORKERS)
    return [
        figure(
            f"{pool}: share of requests that landed where their adapter was", share, "%", at_least=MIN_LANDED_PERCENT
        ),
        figure(f"{pool}: loads", num_loads, ""),
        figure(f"{pool}: loads of one cache with all slots", least, ""),
        figure(f"{pool}: ratio of loads", num_loads / least, "", at_most=MAX_LOADS_RATIO),
    ]


async def _send(url: str, names: Sequence[str], seed: int) -> dict[str, str]:
    """Send a request for each name; returns the adapters by request id."""
    rng, gate, adapters = Random(seed), asyncio.Semaphore(_CONCURRENCY), {}
    prompts = [
        Prompt(token_ids=tuple(rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(_PROMPT_TOKENS))) for _ in names
    ]
    async with Client(url) as client:

        async def one(name: str, prompt: Prompt) -> None:
            async with gate:
                answer = await client.complete(prompt, max_tokens=_OUTPUT_TOKENS, model=name)
                adapters[answer.request_id.rpartition("-")[2]] = name

        await asyncio.gather(*(one(name, prompt) for name, prompt in zip(names, prompts, strict=True)))
    return adapters


async def _placements(url: str, adapters: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Adapters and workers by pool, in the order of the router's decisions."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        answer = await http.get("/debug/decisions", params={"limit": MAX_REQUESTS})
    found = []
    for decision in reversed(answer.raise_for_status().json()["data"]):
        name = adapters[decision["request_id"].partition("-")[0]]
        found.append((name, {pool: decision[f"{pool}_worker"] for pool in _POOLS}))
    return found


async def _total(url: str, name: str) -> dict[str, float]:
    """What workers count of their adapters, by pool."""
    async with Client(url) as client:
        samples = await client.samples(f"tandem_worker_adapter_{name}_total")
    return {pool: sum(value for labels, value in samples if labels["role"] == pool) for pool in _POOLS}
