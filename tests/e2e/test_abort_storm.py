"""A whole cluster before and after a storm of aborts. A measurement, and so for nights: see docs/incidents.md."""

import asyncio
import random
import time
from statistics import median

import pytest
import pytest_asyncio

from tests.e2e.oracle import noise
from tests.e2e.running_cluster import running
from tests.e2e.test_aborts import leave_early

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
ABORTED = 0.89
ROUNDS = 5
ROUND = 24
STORM = 600


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster():
    async with running(engine__num_blocks=400, engine__prefill_chunk_tokens=16) as made:
        yield made


async def rate(cluster, salt):
    """Tokens per second of prompts that nobody has sent before, the median of some rounds."""
    rates = []
    for number in range(ROUNDS):
        prompts = [noise(salt + 1000 * number + i, 200) for i in range(ROUND)]
        begun_s = time.monotonic()
        answers = await asyncio.gather(*(cluster.tokens(prompt, 32) for prompt in prompts))
        rates.append(sum(map(len, answers)) / (time.monotonic() - begun_s))
    return median(rates)


async def one_of_storm(cluster, seed, limit):
    draw = random.Random(seed)
    prompt = noise(seed, draw.randrange(50, 400))
    async with limit:
        if draw.random() < ABORTED:
            await leave_early(cluster, draw, prompt, 32)
        else:
            await cluster.stream(prompt, 32)


async def test_throughput_is_back_after_a_storm_of_aborts(cluster):
    await rate(cluster, 1_000_000)
    before = await rate(cluster, 2_000_000)
    limit = asyncio.Semaphore(48)
    await asyncio.gather(*(one_of_storm(cluster, seed, limit) for seed in range(STORM)))
    await cluster.until_idle()
    after = await rate(cluster, 3_000_000)
    await cluster.until_idle()
    print(f"{before:.0f} tokens/s before, {after:.0f} after")
    assert after >= 0.95 * before
