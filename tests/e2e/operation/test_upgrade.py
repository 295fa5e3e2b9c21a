"""Upgrades from the previous version: every mixture serves, and an upgrade under load loses nothing."""

import asyncio
import random
import signal
from itertools import count, product

import pytest
import pytest_asyncio

from tandem.protocol.session_versions import SPOKEN
from tests.e2e.failures.test_router_takeover import second_router
from tests.previous.release import Release, spoken
from tests.support.redis_server import RedisServer
from tests.support.running_cluster import RunningCluster, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
ANSWER = 120
CLIENTS = 4
BEFORE = spoken().session.newest
NAMES = ("router", "prefill-0", "decode-0")
MIXTURES = [frozenset(n for n, old in zip(NAMES, one, strict=True) if old) for one in product((True, False), repeat=3)]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return Release(tmp_path_factory.mktemp("previous"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def answered(oracle):
    """Prompts long enough to be handed over between workers, and their answers."""
    prompts = [oracle.story(9800 + i, 160) for i in range(6)]
    return list(zip(prompts, oracle.batch(prompts, ANSWER), strict=True))


@pytest.mark.parametrize("old", MIXTURES, ids=lambda old: "+".join(sorted(old)) or "none")
async def test_upgrade_every_mixture_of_versions_serves(fork_servers, release, answered, old):
    async with running(command=release.among(old, fork_servers.command)) as cluster:
        answers = await asyncio.gather(*(cluster.stream(prompt, ANSWER) for prompt, _ in answered))
        assert [one.token_ids for one in answers] == [tokens for _, tokens in answered]
        assert await cluster.disaggregated() > 0
        if "router" not in old:
            found = await cluster.figures("tandem_worker_protocol_version")
            expected = {name: BEFORE if name in old else SPOKEN.newest for name in NAMES[1:]}
            assert {name: version for (_, name), version in found.items()} == expected
        await cluster.until_idle()


class Load:
    """Clients in a closed loop; each uses any router that accepts requests."""

    def __init__(self, answered) -> None:
        self.routers: list[RunningCluster] = []
        self.num_right = [0] * CLIENTS
        self._answered = answered
        self._salts = count()

    async def send_requests(self, client):
        draw = random.Random(client)
        while True:
            prompt, tokens = draw.choice(self._answered)
            answer = await draw.choice(self.routers).stream(prompt, ANSWER, cache_salt=f"salt {next(self._salts)}")
            assert answer.token_ids == tokens
            self.num_right[client] += 1

    async def until_more(self):
        """Wait until every client has had an answer to a request sent from now on."""
        before = list(self.num_right)

        async def all_had():
            return all(now >= then + 2 for now, then in zip(self.num_right, before, strict=True))

        await self.routers[0].until(all_had)


async def test_upgrade_under_load_loses_nothing(fork_servers, release, answered):
    """One process at a time, workers first; each drains, a router once it gets no more requests."""
    old = {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"}

    def command(plan, config_path, ready_fd):
        return release.among(old, fork_servers.command)(plan, config_path, ready_fd)

    with RedisServer() as server:
        pools = {"prefill__replicas": 2, "decode__replicas": 2}
        async with running(command=command, redis__url=server.url, **pools) as first, asyncio.TaskGroup() as clients:
            load = Load(answered)
            async with second_router(first, release) as second:
                load.routers = [first, second]
                tasks = [clients.create_task(load.send_requests(client)) for client in range(CLIENTS)]
                await load.until_more()
                for name in sorted(old - {"router"}):
                    await replace(first, old, name)
                    for router in load.routers:
                        await router.until_workers(4)  # who does not wait for that leaves a router without a worker
                    await load.until_more()
                load.routers = [second]
                await replace(first, old, "router")
                await first.until_workers(4)
                load.routers = [first]
                await load.until_more()
            async with second_router(first) as second:
                load.routers = [first, second]
                await load.until_more()
                for router in (first, second):
                    figures = await router.figures("tandem_worker_protocol_version")
                    assert set(figures.values()) == {SPOKEN.newest}
                    assert await router.figure("tandem_redis_bad_entries_total") == 0
                for task in tasks:
                    task.cancel()


async def replace(cluster, old, name):
    """Drain one process; its successor is of this version."""
    old.remove(name)
    pid = cluster.pid(name)
    cluster.local.kill(name, signal.SIGTERM)
    await cluster.local.wait_ready(name, after_pid=pid)


async def test_router_processes_of_both_versions_share_ports(fork_servers, release, answered):
    """As after `pip install` under a running `tandem up`: a process that it starts again is of the new version."""
    command = release.among({"router-0"}, fork_servers.command)
    async with running(command=command, router__processes=2) as cluster:
        # A connection each, which either process may accept.
        answers = await asyncio.gather(*(cluster.stream(prompt, ANSWER) for prompt, _ in answered * 3))
        assert [one.token_ids for one in answers] == [tokens for _, tokens in answered * 3]

        async def both_counted():
            return await cluster.figure("vllm:request_success_total") == len(answers)

        await cluster.until(both_counted)
        snapshot = (await cluster.http.get("/status/snapshot")).json()
        assert snapshot["processes"] == 2
        assert sum(len(pool["workers"]) for pool in snapshot["pools"]) == 2
