"""All of `python -m tandem_bench adapters`: what LoRA adapters cost a step, and where requests for them land.

The latter on a cluster whose workers hold a few of many adapters, of which requests draw theirs by Zipf's law.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import torch
from rich.console import Console

from tandem_bench.adapters.files import packed_bytes, write_adapters
from tandem_bench.adapters.landing import landing_rows, zipf_draws
from tandem_bench.adapters.options import MAX_REQUESTS, PARTS
from tandem_bench.adapters.steps import measure_steps
from tandem_bench.client import Client
from tandem_bench.clusters import Setup, running
from tandem_bench.errors import CannotMeasure
from tandem_bench.make_model import cached_model
from tandem_bench.prompts import Prompt
from tandem_bench.report import Row, figure, print_table
from tandem_bench.shapes import REFERENCE, SHAPES

NUM_WORKERS = 2
"""Of each pool."""
_CONCURRENCY = 4
_PROMPT_TOKENS, _OUTPUT_TOKENS = 96, 8
_FIRST_ID, _LAST_ID = 16, 400
_POOLS = ("prefill", "decode")


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows`. Raises CannotMeasure."""
    parts = options.only or PARTS
    try:
        if "steps" in parts:
            dtype = "bfloat16"
            model = options.model or str(cached_model(SHAPES[REFERENCE], dtype=dtype, note=err.print))
            rows += measure_steps(model, dtype, num_threads=options.threads, rounds=options.rounds, err=err)
        if "landing" in parts:
            rows += await _measure_landing(
                "builtin",
                num_adapters=options.adapters,
                resident=options.resident,
                num_requests=options.requests,
                seed=options.seed,
                err=err,
            )
    finally:
        print_table(out, rows)


async def _measure_landing(
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
            router={"decisions_kept": num_requests},
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
    rows = []
    for pool in _POOLS:
        sent = [(name, workers[pool]) for name, workers in placed]
        count = int(loads[pool])
        rows += landing_rows(pool, sent, num_loads=count, resident=resident, num_workers=NUM_WORKERS)
    return [*rows, figure("a load, on average", 1e3 * sum(seconds.values()) / sum(loads.values()), "ms")]


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
    found: list[tuple[str, dict[str, str]]] = []
    for decision in reversed(answer.raise_for_status().json()["data"]):
        name = adapters[decision["request_id"].partition("-")[0]]
        found.append((name, {pool: decision[f"{pool}_worker"] for pool in _POOLS}))
    if len(found) != len(adapters):
        raise CannotMeasure(f"{len(adapters)} requests, and the router lists {len(found)} decisions")
    return found


async def _total(url: str, name: str) -> dict[str, float]:
    """What workers count of their adapters, by pool."""
    async with Client(url) as client:
        samples = await client.samples(f"tandem_worker_adapter_{name}_total")
    return {pool: sum(value for labels, value in samples if labels["role"] == pool) for pool in _POOLS}
