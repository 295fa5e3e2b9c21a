"""Pools with different caches: other block sizes keep the tokens, quantised KV keeps them plausible."""

import asyncio

import pytest

from tests.support.oracle import prompts
from tests.support.running_cluster import running

MAX_TOKENS = 24
LAYERS = {"engine__prefill_chunk_tokens": 64, "transfer__chunk_bytes": 1 << 14}
"""Several steps for most prompts, and chunks of a few layers."""
WAYS = {
    "16-to-32-shm": {
        "decode__block_size": 32,
        "decode__rack": "r1",
        "prefill__rack": "r1",
        "transfer__transport": "shm",
        **LAYERS,
    },
    "64-to-16-tcp": {"prefill__block_size": 64, "transfer__transport": "tcp", **LAYERS},
    "16-to-64-tcp-2-ranks": {
        "decode__block_size": 64,
        "decode__tensor_parallel_size": 2,
        "transfer__transport": "tcp",
        **LAYERS,
    },
}


@pytest.mark.parametrize(
    "way", ["16-to-32-shm", *(pytest.param(name, marks=pytest.mark.slow) for name in WAYS if name != "16-to-32-shm")]
)
async def test_pools_of_unequal_block_sizes_answers_equal_transformers(way, fork_servers, oracle):
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 9, seed=5)]
    async with running(command=fork_servers.command, **WAYS[way]) as cluster:
        for salt in ("cold", "warm", "warm"):
            answers = await asyncio.gather(*(cluster.tokens(p, MAX_TOKENS, cache_salt=salt) for p, _ in cases))
            assert [
                i for i, (answer, (_, expected)) in enumerate(zip(answers, cases, strict=True)) if answer != expected
            ] == []
        assert await cluster.disaggregated() > 0
        transport = WAYS[way]["transfer__transport"]
        assert await cluster.figure("tandem_link_handoffs", locality="host", transport=transport) > 0
        assert await cluster.figure("tandem_link_bytes_per_second", locality="host", transport=transport) > 0
        snapshot = (await cluster.http.get("/status/snapshot")).json()
        racks = {worker["rack"] for pool in snapshot["pools"] for worker in pool["workers"]}
        assert racks == {WAYS[way].get("decode__rack", "")}
        prompt = max((prompt for prompt, _ in cases), key=len)
        again = await cluster.complete(prompt, MAX_TOKENS, cache_salt="warm")
        # The router finds what is held whatever the size of the blocks that hold it.
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 64
        assert await cluster.figure("tandem_dispatch_retries_total") == 0, "a hand-off failed"
        await cluster.until_idle()
