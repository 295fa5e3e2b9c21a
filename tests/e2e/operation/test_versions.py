"""This version and the one before it in one cluster: nobody outside can tell.

Every process of the one before is its own code (`tests.previous`), started from its own folder.
"""

import asyncio
import signal
from itertools import count

import pytest
import pytest_asyncio

from router.api.answer.stream_ids import StreamIds
from tandem.cluster_state.entries import Process
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.protocol.session_versions import SPOKEN
from tests.e2e.failures.test_router_takeover import Reader, second_router
from tests.previous.release import Release, spoken
from tests.support.redis_server import RedisServer
from tests.support.running_cluster import body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = 300
STREAMS = 2
BEFORE = spoken().session.newest


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    return Release(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def server():
    with RedisServer() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def routers(fork_servers, release, server):
    """A router of each version, over the same workers and Redis; one decode worker of each version."""
    command = release.among({"prefill-0", "decode-1"}, fork_servers.command)
    async with (
        running(command=command, decode__replicas=2, redis__url=server.url, redis__lease_s=1.0) as this,
        second_router(this, release) as before,
    ):
        yield this, before


def requests_of(oracle, first):
    """Prompts long enough to be handed over between workers; every other request draws."""
    prompts = [oracle.story(first + i, 200) for i in range(STREAMS)]
    return [
        body(prompt, ANSWER, **({"temperature": 0.9, "seed": 7} if i % 2 else {})) for i, prompt in enumerate(prompts)
    ]


async def undisturbed(router, requests, oracle):
    """The answers of an undisturbed run."""
    readers = [Reader(one) for one in requests]
    assert all(await asyncio.gather(*(reader.read(router.http) for reader in readers)))
    answers = [reader.token_ids[0] for reader in readers]
    assert answers[::2] == [oracle.tokens(one["prompt"], ANSWER) for one in requests[::2]]
    return answers


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def answered(routers, oracle):
    """Requests and their expected answers."""
    requests = requests_of(oracle, 9600)
    return requests, await undisturbed(routers[0], requests, oracle)


async def under_way(readers):
    await asyncio.gather(*(reader.has_some.wait() for reader in readers))


class Whereabouts:
    """The decode worker of a stream, by the ids of its events."""

    def __init__(self, cluster, server):
        config = cluster.local.config
        self._ids = StreamIds(config.secret.get_secret_value().encode(), most_s=config.router.request_timeout_s)
        self._marks = ("ZRANGE", ClusterStateKeys(config.redis.cluster).workers, 0, -1)
        self._server = server

    def of(self, readers):
        processes = [Process.parse(mark.decode()) for mark in self._server.do(*self._marks)]
        names = {process.incarnation: process.worker_id for process in processes}
        return {names[self._ids.read(reader.last_id).choices[0].worker] for reader in readers}


async def lost(routers):
    """Attempts so far that lost their worker."""
    return sum([await router.figure("tandem_dispatch_retries_total", reason="worker_lost") for router in routers])


@pytest.mark.turn(0)
async def test_cluster_of_two_versions_serves(routers, answered, server):
    this, before = routers
    requests, expected = answered
    figures = await this.figures("tandem_worker_protocol_version")
    spoken_with = {name: version for (_, name), version in figures.items()}
    assert spoken_with == {"prefill-0": BEFORE, "decode-0": SPOKEN.newest, "decode-1": BEFORE}
    assert await before.figures("tandem_worker_protocol_version") == {}, "it has no such metric"
    for router in routers:

        async def on_the_board(router=router):
            figures = [await router.figure(f"tandem_redis_{name}") for name in ("followed_workers", "peer_routers")]
            return figures == [3, 1]

        await router.until(on_the_board)

    assert await this.disaggregated() > 0
    where, left, salts = Whereabouts(this, server), {"decode-0", "decode-1"}, count()
    while left:
        # Salted, so that no worker is preferred for what it has cached.
        readers = [Reader(one | {"cache_salt": f"{next(salts)}"}) for one in requests * 2]
        clients, num_lost = [router.http for router in routers for _ in requests], await lost(routers)
        reading = [asyncio.ensure_future(reader.read(http)) for reader, http in zip(readers, clients, strict=True)]
        await under_way(readers)
        pids = {name: this.pid(name) for name in sorted(left & where.of(readers))[:1]}
        for name in pids:
            this.local.kill(name, signal.SIGKILL)
        assert all(await asyncio.gather(*reading)), "the other one goes on with all that the dead one had"
        assert [reader.token_ids[0] for reader in readers] == expected * 2
        if await lost(routers) > num_lost:
            left -= pids.keys()
        for name, pid in pids.items() if left else ():
            await this.comes_back(name, pid)
            await before.until_workers(3)
    assert not any([await router.figure("tandem_redis_bad_entries_total") for router in routers])


@pytest.mark.turn(3)
async def test_router_of_other_version_takes_over_streams(routers, answered):
    this, before = routers
    requests, expected = answered
    readers = [Reader(one) for one in requests]
    reading = [asyncio.ensure_future(reader.read(this.http)) for reader in readers]
    await under_way(readers)
    this.local.kill("router", signal.SIGKILL)
    assert not any(await asyncio.gather(*reading)), "all were under way"
    again = [asyncio.ensure_future(reader.read(before.http)) for reader in readers]
    assert all(await asyncio.gather(*again))
    assert [reader.token_ids[0] for reader in readers] == expected
    assert await before.figure("tandem_placements_total", reason="adopted") >= STREAMS
