"""Clients that disconnect at any moment leave nothing of their requests behind."""

import asyncio
import random

import pytest
import pytest_asyncio

from tests.support.oracle import noise
from tests.support.running_cluster import Streamed, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONCURRENT = 24
ATTEMPTS = 20


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow)]
)
async def cluster(fork_servers, request):
    """Small pools and slow prefill, so that requests also wait, are preempted and evict each other's cache."""
    async with running(
        command=fork_servers.command,
        engine__num_blocks=400,
        engine__prefill_chunk_tokens=16,
        transfer__transport=request.param,
    ) as made:
        yield made


async def leave_early(cluster, draw, prompt, max_tokens, **more):
    """Disconnect before the answer begins, or after some of it."""
    got = Streamed()
    chunks = cluster.chunks(prompt, max_tokens, got, **more)
    if draw.random() < 0.5:
        patience_s = draw.random() ** 3 * 0.5
        task = asyncio.ensure_future(anext(chunks, None))
        await asyncio.wait({task}, timeout=patience_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        async for _ in chunks:
            if len(got.token_ids) >= max_tokens // 2:
                break
    await chunks.aclose()
    return None


async def one_of_many(cluster, seed):
    """A random request; returns its answer, or None when its client left."""
    draw = random.Random(seed)
    # Few beginnings, so that prefixes are shared while others are torn away.
    prompt = [*noise(draw.randrange(6), draw.randrange(16, 200)), *noise(seed, draw.randrange(1, 300))]
    max_tokens = draw.randrange(1, 40)
    more = {"seed": seed, "temperature": draw.choice([0, 0.9])}
    if draw.random() < 0.3:
        return await leave_early(cluster, draw, prompt, max_tokens, **more)
    got = await cluster.stream(prompt, max_tokens, **more)
    assert len(got.token_ids) == got.usage["completion_tokens"] == max_tokens
    return got


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.turn(0)
async def test_random_aborts_leave_nothing_behind(cluster, oracle, count):
    limit = asyncio.Semaphore(CONCURRENT)

    async def run(seed):
        async with limit:
            return await one_of_many(cluster, seed)

    answers = await asyncio.gather(*(run(seed) for seed in range(count)))
    assert count * 0.5 < sum(answer is not None for answer in answers) < count * 0.9
    await cluster.until_idle()
    prompt = oracle.story(5, 300)
    assert await cluster.tokens(prompt, 48) == oracle.tokens(prompt, 48)
    await cluster.until_idle()


async def test_client_leaving_during_long_prefill_frees_both_workers(cluster):
    async def leaves(seed):
        """Whether the prompt was still being computed."""
        before = await cluster.disaggregated()
        chunks = cluster.chunks(noise(seed, 1500), 8, Streamed())
        task = asyncio.ensure_future(anext(chunks))

        async def placed():
            return await cluster.disaggregated() > before

        await cluster.until(placed)
        was_in_time = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await chunks.aclose()
        return was_in_time

    async def leave(seed):
        # On a busy machine the engine may be through before the test hears that it began: then with another prompt.
        for attempt in range(ATTEMPTS):
            if await leaves(seed + 100 * attempt):
                return
        pytest.fail(f"{ATTEMPTS} prompts were computed before anybody could leave")

    await asyncio.gather(*(leave(20_000 + i) for i in range(4)))
    await cluster.until_idle()


async def test_client_leaving_unstreamed_answer_frees_workers(cluster):
    task = asyncio.ensure_future(cluster.complete(noise(30_000, 800), 1000))
    before = await cluster.figure("vllm:generation_tokens_total")

    async def speaking():
        return await cluster.figure("vllm:generation_tokens_total") > before

    await cluster.until(speaking)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.until_idle()
