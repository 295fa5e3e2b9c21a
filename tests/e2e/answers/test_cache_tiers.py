"""A cluster with small pools, whose host memory and disk tiers keep prefixes, also over a restart."""

import random
from itertools import product

import pytest

from tests.support.running_cluster import running

SECRET = "stated, not drawn at start"
NUM_PROMPTS, LENGTH = 8, 200
SMALL = {
    "secret": SECRET,
    "engine__num_blocks": 20,
    "engine__host_cache_bytes": 2 << 20,
    "engine__disk_cache_bytes": 64 << 20,
}


def prompts():
    draw = random.Random(5)
    return [[draw.randrange(3, 1000) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]


async def ask_all(cluster):
    """The answers, and the number of cached prompt tokens."""
    answers = [await cluster.complete(prompt, 4) for prompt in prompts()]
    token_ids = [answer["choices"][0]["token_ids"] for answer in answers]
    return token_ids, [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


@pytest.mark.parametrize(
    "replicas", [pytest.param(0, marks=pytest.mark.turn(1)), pytest.param(1, marks=pytest.mark.slow)]
)
async def test_disk_tier_survives_cluster_restart(fork_servers, tmp_path, replicas):
    settings = SMALL | {"engine__disk_cache_path": str(tmp_path), "prefill__replicas": replicas}
    async with running(command=fork_servers.command, **settings) as first:
        expected, cached = await ask_all(first)
        assert not any(cached)
        again, cached = await ask_all(first)
        assert again == expected
        assert sum(cached) > 0, "the pool holds one prompt and a half"
    async with running(command=fork_servers.command, **settings) as second:
        again, cached = await ask_all(second)
        assert again == expected
        assert sum(cached) > NUM_PROMPTS * LENGTH // 2, "what a slow disk was not ready to take is lost"

        async def counted():
            return await second.figure("tandem_worker_cache_hits_total", tier="disk") > 0

        await second.until(counted)
        for tier, name in product(("host", "disk"), ("hits_total", "loaded_bytes_total", "load_seconds_total")):
            assert await second.figure(f"tandem_worker_cache_{name}", tier=tier) >= 0
        assert await second.figure("tandem_worker_cache_damaged_total") == 0
    assert not any(SECRET in path.name for path in tmp_path.rglob("*"))
