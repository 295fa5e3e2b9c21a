"""Workers and routers that find Redis through sentinels: a real failover under load, and every sentinel answer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest

from cluster.doctor.checks import cluster_state
from cluster.doctor.findings import Status
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.redis_settings import RedisSettings, SentinelSettings
from tandem.config.cluster import load
from tandem.config.redis import RedisConfig
from tandem.rpc.redis_link import RECHECK_S, RedisDown, RedisLink
from tandem.values.ids import BlockHash
from tests.support.fake_worker import expected_tokens
from tests.support.redis_cluster import QUICK, PublishingWorker, Router, router
from tests.support.redis_sentinels import MASTER_NAME, SentinelGroup
from tests.support.redis_server import RedisServer, free_port, until


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with SentinelGroup(password="hush-hush", sentinel_password="tell-nobody") as started:
        yield started


def board_through(group: SentinelGroup) -> RedisSettings:
    """A board with the settings of a file."""
    config = RedisConfig(
        password="hush-hush",
        sentinels=tuple(group.addresses),
        sentinel_master=MASTER_NAME,
        sentinel_password="tell-nobody",
        timeout_s=0.3,
        lease_s=1.0,
    )
    settings = config.redis_settings()
    assert settings is not None
    return settings


def prompt(number: int) -> tuple[int, ...]:
    return tuple(Random(number).randrange(900) for _ in range(100))


class Load:
    """Checked requests to all routers in turn, with new prefixes all the time."""

    def __init__(self, routers: list[Router]) -> None:
        self._routers = routers
        self.num_answered = 0
        self._task = asyncio.ensure_future(self._go_on())

    async def _go_on(self) -> None:
        while True:
            number = self.num_answered
            # Every second one has been answered before, by the other router.
            text = prompt(number // 2)
            assert await self._routers[number % 2].ask(text) == expected_tokens(text, count=8, seed=3)
            self.num_answered += 1
            await asyncio.sleep(0.005)

    async def wait_for_answers(self, count: int) -> None:
        """Wait until so many more are answered."""
        enough = self.num_answered + count
        await until(lambda: self._task.done() or self.num_answered >= enough, "answers")
        assert not self._task.done(), self._task.exception()

    async def stop(self) -> None:
        assert not self._task.done(), self._task.exception()
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def loaded(group: SentinelGroup) -> AsyncIterator[tuple[list[PublishingWorker], list[Router], Load]]:
    """Two workers, two routers and requests, until the context is left; none may fail."""
    settings = board_through(group)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(PublishingWorker(f"d{i}", settings)) for i in range(2)]
        routers = [await stack.enter_async_context(router(i, settings, live=2)) for i in range(2)]
        load = Load(routers)
        await load.wait_for_answers(20)
        yield workers, routers, load
        await load.stop()
        await until_all_synchronized(workers, routers)


async def until_all_synchronized(workers: list[PublishingWorker], routers: list[Router]) -> None:
    """Wait until the routers know the workers' content, and all of them are connected."""
    await until(lambda: all(each.agrees_with(*workers) for each in routers), "all routers know what workers hold")
    await until(lambda: all(link.is_up for each in routers for link in each.redis.links), "routers are connected")
    await until(lambda: all(each.publisher and each.publisher.report().up for each in workers), "workers are connected")


async def learned(workers: list[PublishingWorker], routers: list[Router], number: int) -> None:
    """Wait until every router knows a newly stored prefix, which no request has."""
    names = [BlockHash(number.to_bytes(16, "big"))]

    def known() -> bool:
        for worker in workers:
            worker.store(names)  # or the load would evict it
        return all(names[0] in each.knows(worker) for each in routers for worker in workers)

    await until(known, f"block {number}")


@pytest.mark.turn(1)
async def test_sentinel_failover_loses_no_request_and_restores_prefixes(
    group: SentinelGroup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with loaded(group) as (workers, routers, load):
        group.sentinels[0].kill()  # the one that everybody asked first
        group.first.kill()
        await load.wait_for_answers(20)
        await learned(workers, routers, 1)
        assert group.role(group.second) == b"master"
        assert group.second.do("DBSIZE") > 0
        assert "hush-hush" not in caplog.text
        assert "tell-nobody" not in caplog.text
        await until(lambda: all(each.redis.num_peers == 1 for each in routers), "routers see each other")
        assert all(each.redis.num_followed == 2 for each in routers)
        await load.wait_for_answers(20)


@pytest.mark.slow
async def test_sentinel_demoted_master_is_left_alone(group: SentinelGroup) -> None:
    async with loaded(group) as (workers, routers, load):
        group.first.hang()
        await learned(workers, routers, 2)
        assert group.role(group.second) == b"master"
        group.first.go_on()
        await load.wait_for_answers(20)
        await until(lambda: group.role(group.first) == b"slave", "the sentinels made it a replica")
        await load.wait_for_answers(20)
        await learned(workers, routers, 3)
        group.second.kill()
        await learned(workers, routers, 4)
        assert group.role(group.first) == b"master"


# One link, and sentinels that say what a test wants.


class FakeSentinel:
    """Answers every command with the same bytes, if at all; a context manager."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.num_asked = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FakeSentinel":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        return "127.0.0.1", self._server.sockets[0].getsockname()[1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                if words[0] != b"SENTINEL":
                    writer.write(b"-ERR unknown command\r\n")
                    continue
                assert words[1:] == [b"GET-MASTER-ADDR-BY-NAME", b"mymaster"]
                self.num_asked += 1
                if self.answer is not None:
                    writer.write(self.answer)
        finally:
            writer.close()


def points_to(server: RedisServer, host: bytes = b"127.0.0.1") -> bytes:
    port = str(server.port).encode()
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(host), host, len(port), port)


class LinkRig:
    """One link and its clock."""

    def __init__(self, *sentinels: tuple[str, int], timeout_s: float = 20.0) -> None:
        self.now_s = 0.0
        settings = RedisSettings(sentinel=SentinelSettings(addresses=sentinels, master="mymaster"), timeout_s=timeout_s)
        breaker = CircuitBreaker(QUICK, Random(1))
        self.link = RedisLink(settings, breaker, use="poll", clock=lambda: self.now_s)

    async def sets(self, key: str) -> None:
        assert await self.link.execute([("SET", key, "1")], vital=1) == [b"OK"]

    async def rechecks(self, key: str) -> None:
        """Set a key, and wait until the sentinels that are asked meanwhile have answered."""
        await self.sets(key)
        assert self.link._search is not None
        await asyncio.wait([self.link._search])


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as one, RedisServer() as other:
        yield one, other


async def test_redis_link_follows_sentinel_away_from_live_server(
    servers: tuple[RedisServer, RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tandem.rpc.redis_link")
    one, other = servers
    async with FakeSentinel(points_to(one)) as sentinel:
        rig = LinkRig(sentinel.address)
        await rig.sets("a")
        sentinel.answer = points_to(other)
        rig.now_s += RECHECK_S - 0.1
        await rig.sets("b")
        assert (one.do("DBSIZE"), other.do("DBSIZE"), sentinel.num_asked) == (2, 0, 1)
        rig.now_s += 0.1
        await rig.rechecks("c")
        assert (one.do("DBSIZE"), other.do("DBSIZE"), sentinel.num_asked) == (3, 0, 2)
        await rig.sets("d")
        assert (one.do("DBSIZE"), other.do("DBSIZE"), sentinel.num_asked) == (3, 1, 2)
        sentinel.answer = b"*-1\r\n"
        rig.now_s += RECHECK_S
        await rig.rechecks("e")
        await rig.sets("f")
        assert (other.do("DBSIZE"), sentinel.num_asked) == (3, 3), "without an answer the server stays"
        await rig.link.close()
    assert f"a new master: 127.0.0.1:{other.port}/0 (was 127.0.0.1:{one.port}/0)" in caplog.text


async def test_redis_link_follows_most_sentinels(servers: tuple[RedisServer, RedisServer]) -> None:
    """The one that answers first may be cut off from the others, beside a master that they have replaced."""
    one, other = servers
    async with FakeSentinel(points_to(one)) as cut, FakeSentinel(points_to(other)) as b, FakeSentinel(b.answer) as c:
        rig = LinkRig(cut.address, b.address, c.address)
        await rig.sets("a")
        assert rig.link.display_name == f"127.0.0.1:{one.port}/0"
        rig.now_s += RECHECK_S
        await rig.rechecks("b")
        await rig.sets("c")
        assert rig.link.display_name == f"127.0.0.1:{other.port}/0"
        await rig.link.close()


async def test_redis_link_skips_failing_sentinels(servers: tuple[RedisServer, RedisServer]) -> None:
    one, _ = servers
    ignorant, good = FakeSentinel(b"*-1\r\n"), FakeSentinel(points_to(one, b"localhost"))
    async with ignorant, good:
        rig = LinkRig(("127.0.0.1", free_port()), ignorant.address, good.address)
        await rig.sets("a")
        await rig.link.close()
        await rig.sets("a")
        assert (ignorant.num_asked, good.num_asked) == (1, 2), "the one that answered is asked first"
        await rig.link.close()


async def test_commands_on_an_open_connection_do_not_wait_for_silent_sentinels(
    servers: tuple[RedisServer, RedisServer],
) -> None:
    one, _ = servers
    async with FakeSentinel(points_to(one)) as first, FakeSentinel(None) as second:
        rig = LinkRig(first.address, second.address)
        await rig.sets("a")
        first.answer = None
        rig.now_s += RECHECK_S
        await rig.sets("b")
        search = rig.link._search
        assert search is not None
        await rig.sets("c")
        assert not search.done(), "nobody has waited for it"
        await rig.link.close()
        assert search.cancelled()


async def test_search_passes_over_silent_sentinels_within_its_bound(servers: tuple[RedisServer, RedisServer]) -> None:
    one, _ = servers
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(FakeSentinel(None)) for _ in range(2)]
        good = await stack.enter_async_context(FakeSentinel(points_to(one)))
        rig = LinkRig(*(each.address for each in (*silent, good)), timeout_s=2.0)
        await rig.sets("a")
        assert [each.num_asked for each in (*silent, good)] == [1, 1, 1]
        await rig.link.close()


async def test_search_among_silent_sentinels_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    timeout = asyncio.timeout

    def noted(delay_s: float | None) -> asyncio.Timeout:
        waits.append(delay_s)
        return timeout(delay_s)

    monkeypatch.setattr(asyncio, "timeout", noted)
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(FakeSentinel(None)) for _ in range(3)]
        rig = LinkRig(*(each.address for each in silent), timeout_s=0.3)
        with pytest.raises(RedisDown) as down:
            await rig.sets("a")
    assert str(down.value).count("no answer within 0.3 s") == 3
    assert [one for one in waits if one is not None] == [0.3]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"*-1\r\n", "knows no master named 'mymaster'"),
        (b"-NOAUTH Authentication required.\r\n", "Authentication required"),
        (b"+OK\r\n", "not a valid Sentinel reply"),
        (b"*2\r\n$1\r\n \r\n$1\r\n1\r\n", "not a valid Sentinel reply"),
        (b"*2\r\n$1\r\nh\r\n$5\r\n99999\r\n", "not a valid Sentinel reply"),
        (b"*2\r\n$2\r\n\xff\xff\r\n$1\r\n1\r\n", "not a valid Sentinel reply"),
        (b"$5000\r\n" + b"x" * 5000 + b"\r\n", "a reply is larger than"),
        (None, "no answer within 0.3 s"),
    ],
)
async def test_sentinel_answer_without_master_counts_as_down(answer: bytes | None, told: str) -> None:
    async with FakeSentinel(answer) as sentinel:
        rig = LinkRig(sentinel.address, timeout_s=0.3)
        with pytest.raises(RedisDown) as down:
            await rig.sets("a")
        assert told in str(down.value)
        assert f"sentinel 127.0.0.1:{sentinel.address[1]}: " in str(down.value)
        assert rig.link.health.failures == 1


async def test_doctor_asks_redis_through_each_sentinel(servers: tuple[RedisServer, RedisServer]) -> None:
    one, _ = servers
    async with FakeSentinel(points_to(one)) as good, FakeSentinel(b"*-1\r\n") as ignorant:
        sentinels = [f"127.0.0.1:{each.address[1]}" for each in (good, ignorant)]
        config = load(None, {"redis.sentinels": sentinels, "redis.timeout_s": 20.0})
        found = await asyncio.to_thread(cluster_state, config)
    assert [(each.name, each.status) for each in found] == [
        (f"sentinel {sentinels[0]}", Status.OK),
        (f"sentinel {sentinels[1]}", Status.WARN),
    ]
    assert found[0].detail == f"Redis at 127.0.0.1:{one.port}/0 answers"
    assert "knows no master named 'mymaster'" in found[1].detail
    (direct,) = await asyncio.to_thread(cluster_state, load(None, {"redis.url": one.url}))
    assert (direct.name, direct.status) == ("cluster state", Status.OK)
    assert cluster_state(load(None)) == []


async def test_sentinel_pointing_to_replica_is_not_trusted(servers: tuple[RedisServer, RedisServer]) -> None:
    one, other = servers
    other.do("REPLICAOF", "127.0.0.1", "1")
    late, right = FakeSentinel(points_to(other)), FakeSentinel(points_to(one))
    async with late, right:
        rig = LinkRig(late.address, right.address)
        with pytest.raises(RedisDown, match="which is not a master"):
            await rig.sets("a")
        await rig.sets("a")
        assert (late.num_asked, right.num_asked) == (1, 1)
        await rig.link.close()
    other.do("REPLICAOF", "NO", "ONE")
