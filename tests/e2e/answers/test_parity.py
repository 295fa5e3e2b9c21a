"""The same greedy tokens as `transformers` in fp32, on every path of a prompt."""

import asyncio

import pytest
import pytest_asyncio

from tests.support.oracle import prompts
from tests.support.running_cluster import running

MAX_TOKENS = 64
BATCH = 16
WAYS = {
    "shm-512": {"transfer__transport": "shm", "engine__prefill_chunk_tokens": 512},
    "tcp-64": {"transfer__transport": "tcp", "engine__prefill_chunk_tokens": 64, "transfer__chunk_bytes": 1 << 18},
    "shm-16": {"transfer__transport": "shm", "engine__prefill_chunk_tokens": 16},
    "colocated-64": {"prefill__replicas": 0, "engine__prefill_chunk_tokens": 64},
}
LONG_WAYS = {
    "tcp-16": {"transfer__transport": "tcp", "engine__prefill_chunk_tokens": 16},
    "tcp-512": {"transfer__transport": "tcp", "engine__prefill_chunk_tokens": 512},
    "shm-64": {"transfer__transport": "shm", "engine__prefill_chunk_tokens": 64},
    "colocated-16": {"prefill__replicas": 0, "engine__prefill_chunk_tokens": 16},
    "colocated-512": {"prefill__replicas": 0, "engine__prefill_chunk_tokens": 512},
}
TURNS = {"colocated-64": 0, "shm-16": 2}
"""The others, one of each transport, are in every run."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.turn(TURNS[name]) if name in TURNS else ()) for name in WAYS),
        *(pytest.param(name, marks=pytest.mark.slow) for name in LONG_WAYS),
    ],
)
async def cluster(request, fork_servers):
    # On a slow and busy machine they wait, and are not refused.
    way = {"router__max_queue_s": 600.0, **(WAYS | LONG_WAYS)[request.param]}
    async with running(command=fork_servers.command, **way) as made:
        yield made


@pytest.fixture(scope="module", params=[12, pytest.param(40, marks=pytest.mark.slow)])
def cases(request, oracle):
    """Prompts, and what `transformers` answers."""
    made = prompts(oracle, request.param)
    return [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in made]


async def test_cluster_answers_equal_transformers(cluster, cases):
    """Each prompt alone, then again from the prefix caches, then 16 at a time without them."""
    has_prefill_pool = cluster.local.config.prefill.replicas > 0
    before = await cluster.disaggregated()
    salt = f"alone of {len(cases)}"
    cold = [await cluster.complete(prompt, MAX_TOKENS, cache_salt=salt) for prompt, _ in cases]
    assert differing(cases, cold) == []
    assert await cluster.disaggregated() - before == has_prefill_pool * len(cases)
    assert all(cached(answer) < len(prompt) // 2 + 40 for (prompt, _), answer in zip(cases, cold, strict=True))

    warm = [await cluster.complete(prompt, MAX_TOKENS, cache_salt=salt) for prompt, _ in cases]
    assert differing(cases, warm) == []
    assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // 16 * 16 for prompt, _ in cases]

    batch = (cases * (BATCH // len(cases) + 1))[: max(BATCH, len(cases))]
    limit = asyncio.Semaphore(BATCH)

    async def ask(index, prompt):
        async with limit:
            return await cluster.complete(prompt, MAX_TOKENS, cache_salt=f"batch {len(cases)} {index}")

    together = await asyncio.gather(*(ask(index, prompt) for index, (prompt, _) in enumerate(batch)))
    assert differing(batch, together) == []
    assert all(cached(answer) == 0 for answer in together)
    assert await cluster.disaggregated() - before == has_prefill_pool * (len(cases) + len(batch))
    await cluster.until_idle()


def differing(cases, answers):
    """Prompts with a different answer."""
    answered = [answer["choices"][0]["token_ids"] for answer in answers]
    return [i for i, ((_, expected), tokens) in enumerate(zip(cases, answered, strict=True)) if tokens != expected]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
