"""A cluster with 8-bit KV answers like one torch process with such a cache, one prompt at a time."""

import asyncio
import random

import pytest
import torch

from tests.e2e.answers.test_parity import cached, differing
from tests.support.engine.paged_harness import Session, load_plain
from tests.support.oracle import BUILTIN, noise
from tests.support.running_cluster import running

MAX_TOKENS = 24
WAYS = {
    "int8-shm": {"engine__kv_dtype": "int8", "transfer__transport": "shm", "engine__prefill_chunk_tokens": 64},
    "int8-tcp": {"engine__kv_dtype": "int8", "transfer__transport": "tcp", "transfer__chunk_bytes": 1 << 16},
    "fp8-shm": {"engine__kv_dtype": "fp8_e4m3", "transfer__transport": "shm", "engine__prefill_chunk_tokens": 64},
}


def expected(prompts, kv_dtype):
    """Greedy tokens in float32."""
    model = load_plain(BUILTIN)
    answers = []
    for prompt in prompts:
        session = Session(model, num_blocks=32, block_size=16, kv_dtype=kv_dtype)
        request = session.request(prompt, capacity=512)
        session.run([request], MAX_TOKENS, chunk=1024)
        answers.append(list(request.token_ids)[len(prompt) : len(prompt) + MAX_TOKENS])
    return answers


@pytest.mark.parametrize(
    "way", ["int8-shm", *(pytest.param(name, marks=pytest.mark.slow) for name in WAYS if name != "int8-shm")]
)
async def test_quantised_handoff_answers_equal_transformers(way, fork_servers, oracle):
    settings = WAYS[way]
    lengths = random.Random(way)
    prompts = [make(i, lengths.randint(80, 400)) for i, make in enumerate([oracle.story, noise] * 4)]
    with torch.inference_mode():
        cases = list(zip(prompts, expected(prompts, settings["engine__kv_dtype"]), strict=True))
    async with running(command=fork_servers.command, **settings) as cluster:
        cold = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        assert differing(cases, cold) == []
        assert await cluster.disaggregated() == len(prompts)
        warm = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        assert differing(cases, warm) == []
        assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        together = await asyncio.gather(*(cluster.complete(prompt, MAX_TOKENS, cache_salt="b") for prompt in prompts))
        assert differing(cases, together) == []
        await cluster.until_idle()
