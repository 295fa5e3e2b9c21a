"""Oversized values written to Redis without the secret are neither read nor kept."""

import time
from contextlib import AsyncExitStack

import pytest

from tandem.cluster_state.redis_keys import ClusterStateKeys
from tests.support.redis_cluster import PublishingWorker, redis_settings_at, router
from tests.support.redis_server import RedisServer, until

KEYS = ClusterStateKeys("tandem")
LARGE = 8 << 20


@pytest.mark.parametrize("score", ["now", "never"])
@pytest.mark.parametrize("registry", [KEYS.routers, KEYS.workers], ids=["routers", "workers"])
async def test_oversized_set_members_are_removed(registry: str, score: str) -> None:
    at = time.time() * 1e3 if score == "now" else 9e15
    with RedisServer() as server:
        settings = redis_settings_at(server)
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(PublishingWorker("d0", settings))
            first, second = [await stack.enter_async_context(router(i, settings, live=1)) for i in range(2)]
            await until(lambda: first.redis.num_peers == second.redis.num_peers == 1, "two routers")
            ours = set(server.client.zrange(registry, 0, -1))
            for number in range(3):
                server.client.zadd(registry, {b"%d" % number + b"f" * LARGE: at})
            # Counted, not read: reading 24 MB again and again would block Redis for all other clients.
            await until(lambda: server.client.zcard(registry) == len(ours), "the large ones have gone")
            assert set(server.client.zrange(registry, 0, -1)) == ours
            await until(lambda: first.redis.num_peers == second.redis.num_peers == 1, "two routers again")
            await until(lambda: first.redis._poll.health.is_up, "and Redis is believed again")
            assert len(await first.ask(tuple(range(40)))) == 8
            await until(lambda: second.agrees_with(worker), "the other router hears of it")


async def test_oversized_log_entry_restarts_the_log() -> None:
    with RedisServer() as server:
        settings = redis_settings_at(server)
        async with PublishingWorker("d0", settings) as worker, router(0, settings, live=1) as reader:
            await reader.ask(tuple(range(40)))
            await until(lambda: reader.agrees_with(worker), "what was computed")
            log = KEYS.log(worker.process)
            server.client.xadd(log, {"e": b"x" * LARGE}, id=f"{10**12}-0")
            await until(lambda: reader.redis._logs.health.failures > 0, "it was refused")
            await until(lambda: (server.client.memory_usage(log) or 0) < LARGE, "only what is ours is there")
            await reader.ask(tuple(range(100, 140)))
            await until(lambda: reader.agrees_with(worker), "what was computed since")
