"""Router processes of one host tell each other what tenants had: real sockets, processes that come and go."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.process.admission_setup import make_limits
from router.siblings.rate_limits import RateLimitExchange
from router.tenants.shared_rate_limits import SharedRateLimits
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tandem.values.ids import Incarnation
from tests.support.redis_server import until

CONFIG = RouterConfig.model_validate({"limits": {"default": {"requests_per_minute": 4, "concurrent_requests": 3}}})


def fresh() -> SharedRateLimits:
    return make_limits(CONFIG, b"a secret of the cluster", lambda: 0.0)


def of(folder: Path, index: int, limits: SharedRateLimits) -> RateLimitExchange:
    return RateLimitExchange(folder, index=index, router=Incarnation(index + 1), limits=limits)


async def test_what_one_gives_the_others_count_until_it_is_gone(tmp_path: Path) -> None:
    limits = [fresh() for _ in range(3)]
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(of(tmp_path, index, limits[index])) for index in (1, 2)]
        async with of(tmp_path, 0, limits[0]) as first:
            await until(lambda: all(each.num_heard == 2 for each in (first, *others)), "all hear each other")
            grants = [limits[0].limiter.admit("", 5.0) for _ in range(3)]
            await until(lambda: all(limits[i].limiter.num_elsewhere("") == 3 for i in (1, 2)), "it is told")
            for each in limits:
                with pytest.raises(Overloaded, match="concurrent_requests"):
                    each.limiter.admit("", 5.0)
            limits[0].limiter.settle(grants[0], 5.0)
            await until(lambda: limits[1].limiter.num_elsewhere("") == 2, "the end is told")
            limits[1].limiter.admit("", 5.0)
        await until(lambda: limits[1].limiter.num_elsewhere("") == 0, "it is gone")
        with pytest.raises(Overloaded, match="requests_per_minute"):
            limits[1].limiter.admit("", 5.0)
    assert not os.listdir(tmp_path)


async def test_a_socket_left_behind_and_one_that_talks_rubbish_harm_nobody(tmp_path: Path) -> None:
    async def rubbish(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xff\xff\x7f" + bytes(64))
        writer.close()

    dead = await asyncio.start_unix_server(rubbish, tmp_path / "limits-7.sock")
    dead.close()
    talker = await asyncio.start_unix_server(rubbish, tmp_path / "limits-8.sock")
    limits = [fresh(), fresh()]
    async with talker, of(tmp_path, 0, limits[0]), of(tmp_path, 1, limits[1]) as second:
        await until(lambda: second.num_heard == 1, "the other is heard")
        limits[0].limiter.admit("", 1.0)
        await until(lambda: limits[1].limiter.num_elsewhere("") == 1, "it is told")
