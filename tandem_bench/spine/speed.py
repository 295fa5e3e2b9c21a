"""Start-up time of a warm cluster, and latency and throughput of both kinds of cluster on this machine."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median

from tandem_bench.client import Client, Completion
from tandem_bench.clusters import COLOCATED, Setup, running
from tandem_bench.prompts import Prompt, random_prompt
from tandem_bench.report import Row, figure

START_GOAL_S = 15.0
MODES = (COLOCATED, "shm", "tcp")
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 64
_KV_BYTES = 4  # of one number in fp32


async def startup_rows(prompt: Prompt, times: int) -> list[Row]:
    """Measure `tandem up` until `/readyz` and until the first token of a request through both pools; medians of
    `times`.
    """
    ready, token = [], []
    for _ in range(times):
        async with running(Setup(mode="shm")) as cluster, Client(cluster.url) as client:
            asked_s = time.monotonic()
            answer = await client.complete(prompt, max_tokens=1)
            ready.append(cluster.ready_s)
            token.append(asked_s - cluster.started_s + answer.first_token_s)
    unit = f"s, median of {times}"
    return [
        figure("startup.ready", median(ready), unit, below=START_GOAL_S),
        figure("startup.first_token", median(token), unit, below=START_GOAL_S),
    ]


async def latency_rows(
    model: Path, modes: Sequence[str], *, concurrencies: Sequence[int], requests_each: int
) -> list[Row]:
    """Measure prompts of 512 random tokens with 64 tokens of answer, every prompt new."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    rows = []
    for mode in modes:
        async with running(Setup(mode=mode)) as cluster, Client(cluster.url) as client:
            rng = Random(f"bench:speed:{mode}")
            vocab_size = int(config["vocab_size"])
            await client.complete(random_prompt(rng, PROMPT_TOKENS, vocab_size), max_tokens=OUTPUT_TOKENS)
            for concurrency in concurrencies:
                count = max(requests_each, 3 * concurrency)
                prompts = [random_prompt(rng, PROMPT_TOKENS, vocab_size) for _ in range(count)]
                started_s = time.monotonic()
                answers = await client.complete_all(prompts, max_tokens=OUTPUT_TOKENS, concurrency=concurrency)
                elapsed_s = time.monotonic() - started_s
                rows += _rows(f"speed.{mode}.c{concurrency}", answers, elapsed_s)
                if mode != COLOCATED and concurrency == 1:
                    rows += _transfer_rows(mode, answers, PROMPT_TOKENS * kv_bytes_per_token(config))
    return rows


def kv_bytes_per_token(config: dict[str, int]) -> int:
    """Return the bytes of K and V of all layers in fp32."""
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * _KV_BYTES
    return config["num_hidden_layers"] * per_layer


def _rows(name: str, answers: Sequence[Completion], elapsed_s: float) -> list[Row]:
    first = [1000 * answer.first_token_s for answer in answers]
    gaps = [1000 * gap for answer in answers for gap in answer.gaps_s]
    tokens = sum(len(answer.token_ids) for answer in answers)
    return [
        figure(f"{name}.ttft_p50", median(first), "ms"),
        figure(f"{name}.ttft_p99", percentile(first, 99), "ms"),
        figure(f"{name}.itl_p50", median(gaps), "ms"),
        figure(f"{name}.itl_p99", percentile(gaps, 99), "ms"),
        figure(f"{name}.output", tokens / elapsed_s, "tokens/s"),
    ]


def _transfer_rows(mode: str, answers: Sequence[Completion], num_bytes: int) -> list[Row]:
    """Report transfers of a single-chunk prompt, so that next to nothing is hidden by computation."""
    mean_s = fmean(answer.transfer_s for answer in answers)
    return [
        figure(f"transfer.{mode}.time", 1000 * mean_s, f"ms for {num_bytes / 2**20:g} MiB"),
        figure(f"transfer.{mode}.rate", num_bytes / mean_s / 1e6 if mean_s else 0.0, "MB/s, SEAL and commit included"),
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
