"""Workers and routers over a real Redis: published state, and recovery from every failure of Redis."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random

import pytest

from router.process.admission_setup import make_limits
from router.types.worker_view import WorkerKey
from router.workers.log_positions import Reload
from tandem.cluster_state.entries import MAX_CHANGES, ClusterStateCodec, Footprint, Notice, Process, RouterLoad, Share
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded, ServingError
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import SECRET, expected_tokens
from tests.support.redis_cluster import PublishingWorker, Router, names_of, redis_settings_at, router
from tests.support.redis_server import RedisServer, until

KEYS = ClusterStateKeys("tandem")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def prompt(number: int, length: int = 100) -> tuple[int, ...]:
    return tuple(Random(number).randrange(900) for _ in range(length))


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


async def two_of_each(stack: AsyncExitStack, server: RedisServer) -> tuple[list[PublishingWorker], list[Router]]:
    settings = redis_settings_at(server)
    workers = [await stack.enter_async_context(PublishingWorker(f"d{i}", settings)) for i in range(2)]
    routers = [await stack.enter_async_context(router(i, settings, live=2)) for i in range(2)]
    return workers, routers


async def until_all_agree(workers: list[PublishingWorker], routers: list[Router]) -> None:
    await until(lambda: all(each.agrees_with(*workers) for each in routers), "all routers know what workers hold")


async def test_routers_share_prefix_routed_by_one(server: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        workers, (first, second) = await two_of_each(stack, server)
        await first.ask(prompt(1))
        await until_all_agree(workers, [first, second])
        names = names_of(prompt(1))
        holder = next(worker for worker in workers if worker.held)
        assert second.registry.prefix_map.longest_prefix(names) == {holder.worker_id: len(names)}
        assignment = second.placer.assign(num_tokens=100, names=names)
        assert assignment.decode.worker_id == holder.worker_id
        assert assignment.placement.cached_tokens == 96
        second.placer.release(assignment)
        holder.store([block(i) for i in range(64)])  # evicts the prompt
        await until_all_agree(workers, [first, second])
        assert second.registry.prefix_map.longest_prefix(names) == {}


async def test_late_router_learns_earlier_cache_events(server: RedisServer) -> None:
    settings = redis_settings_at(server)
    async with PublishingWorker("d0", settings) as worker:
        for step in range(300):
            worker.store([block(i) for i in range(step * 20, step * 20 + 20)])
            await asyncio.sleep(0)
        async with router(0, settings, live=1) as late:
            await until(lambda: late.agrees_with(worker), "state and log")
            worker.store([block(7)])
            await until(lambda: late.agrees_with(worker), "the next change")
            assert late.redis.counts.reloads[Reload.GAP.value] == 0
            assert late.redis.links[0].connects == 1


async def test_worker_logs_are_bounded(server: RedisServer) -> None:
    settings = redis_settings_at(server)
    async with PublishingWorker("d0", settings) as worker, router(0, settings, live=1) as reader:
        log = KEYS.log(worker.process)
        for step in range(12):
            worker.store([block(i) for i in range(step * MAX_CHANGES // 2, (step + 1) * MAX_CHANGES // 2)])
            await until(lambda: reader.agrees_with(worker), "the newest")
        entries = server.do("XRANGE", log, "-", "+")
        assert sum(len(fields[b"e"]) for _, fields in entries) < 3 * 4096 * 17 * 2
        assert worker.publisher is not None
        assert worker.publisher.report().states >= 2


FAULTS = ("killed", "hung", "slow", "flushed", "replica", "no_replicas", "full", "restarted", "lying")
SILENT, READ_ONLY = ("killed", "hung", "slow"), ("replica", "no_replicas", "full")
"""Faults in which circuit breakers open: of all links, and of those of workers, which publish."""
LIMITS = {"no_replicas": "min-replicas-to-write", "full": "maxmemory"}


class Fate:
    """A fault of Redis, and its end."""

    def __init__(self, server: RedisServer, kind: str) -> None:
        self._server = server
        self._kind = kind
        self._faster = threading.Event()
        self._brake = threading.Thread(target=self._slow_down, daemon=True)

    def _slow_down(self) -> None:
        """Answers come within their timeout or after it, at random."""
        rng = Random(1)
        while not self._faster.is_set():
            self._server.do("CLIENT", "PAUSE", rng.randrange(20, 500), "ALL")

    def begin(self, workers: list[PublishingWorker]) -> None:
        server = self._server
        match self._kind:
            case "killed":
                server.kill()
            case "hung":
                server.hang()
            case "slow":
                self._brake.start()
            case "flushed":
                server.do("FLUSHALL")
            case "replica":
                server.do("REPLICAOF", "127.0.0.1", "1")
            case "no_replicas" | "full" as limit:
                server.do("CONFIG", "SET", LIMITS[limit], "1")
            case "restarted":
                server.kill()
                server.start()
            case "lying":
                lie(server, workers)

    def end(self) -> None:
        server = self._server
        match self._kind:
            case "killed":
                server.start()
            case "hung":
                server.go_on()
            case "slow":
                self._faster.set()
                self._brake.join()
            case "replica":
                server.do("REPLICAOF", "NO", "ONE")
            case "no_replicas" | "full" as limit:
                server.do("CONFIG", "SET", LIMITS[limit], "0")


def lie(server: RedisServer, workers: list[PublishingWorker]) -> None:
    """Everything that can be written without the secret."""
    forger = ClusterStateCodec(b"not the secret at all", "tandem")
    nobody = Process(WorkerId("d9"), Incarnation(9))
    soon_ms = 1e3 * time.time() + 60_000  # before all others, and not too late to be believed
    for member in (nobody.mark, "\xff\x00", "@", "d9@zz", "x" * 5000, "99"):
        server.do("ZADD", KEYS.workers, soon_ms, member)
        server.do("ZADD", KEYS.routers, soon_ms, member)
    server.do("SET", KEYS.notice(nobody), forger.seal_notice(notice(nobody)))
    load = RouterLoad(router=Incarnation(0x99), sequence=1, shares=())
    server.do("SET", KEYS.load(load.router), forger.seal_load(load))
    first, second = (worker.process for worker in workers)
    server.do("SET", KEYS.notice(first), b"garbage")
    server.do("SET", KEYS.state(first), forger.seal_state(first, 10**6, [block(1)]))
    server.do(
        "SET",
        KEYS.head(first),
        forger.seal_head(first, Footprint(next_sequence=10**6, state_sequence=0, num_entries=0)),
    )
    server.do("XADD", KEYS.log(first), "*", "e", b"garbage")
    server.do("XADD", KEYS.log(first), f"{(1 << 64) - 1}-1", "f", b"garbage", "g", b"x")
    for key in (KEYS.log(second), KEYS.state(second)):
        server.do("DEL", key)
        server.do("SADD", key, b"not what you think")


def notice(process: Process) -> Notice:
    return Notice(process=process, role=WorkerRole.DECODE, address="127.0.0.1:9")


@pytest.mark.parametrize("kind", FAULTS)
async def test_redis_outage_fails_no_request_and_recovers(server: RedisServer, kind: str) -> None:
    async with AsyncExitStack() as stack:
        workers, routers = await two_of_each(stack, server)
        await until(lambda: all(each.redis.num_followed == 2 for each in routers), "all follow all")
        num_requests = 0

        async def ask(count: int) -> None:
            nonlocal num_requests
            for _ in range(count):
                num_requests += 1
                text = prompt(num_requests % 12)
                assert await routers[num_requests % 2].ask(text) == expected_tokens(text, count=8, seed=3)
                await asyncio.sleep(0.005)

        await ask(20)
        links = [link for each in routers for link in each.redis.links] if kind in SILENT else []
        links += [each.publisher._link.health for each in workers] if kind in SILENT + READ_ONLY else []
        fate, before = Fate(server, kind), [link.failures for link in links]
        fate.begin(workers)
        await ask(40)
        await until(lambda: all(link.failures > n + 1 for link, n in zip(links, before, strict=True)), "open breakers")
        await ask(20)
        fate.end()
        await ask(10)
        await until_all_agree(workers, routers)
        await until(lambda: all(link.is_up for each in routers for link in each.redis.links), "links are up")
        for each in routers:
            assert len(each.registry.snapshots()) == 2
            assert {address.address for address in each.redis.directory._addresses} == {w.address for w in workers}
        if kind in ("replica", "no_replicas"):
            assert all(each.publisher.report().connects > 1 for each in workers), "another server may be there now"
        if kind == "lying":
            await until(lambda: sum(routers[0].redis.counts.bad.values()) > 5, "lies are counted")
        await ask(4)


async def test_crashed_routers_load_expires(server: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        workers, (first, second) = await two_of_each(stack, server)
        for worker in workers:
            worker.holding, worker.reporting = True, False
        requests = [asyncio.ensure_future(first.ask(prompt(i))) for i in range(6)]

        def seen() -> int:
            return sum(snapshot.num_active for snapshot in second.registry.snapshots())

        await until(lambda: seen() == 6, "the other router's requests")
        assert sum(s.backlog_tokens for s in second.registry.snapshots()) == 600
        await first.crash()
        await until(lambda: seen() == 0, "what its lease held")
        assert second.redis.num_peers == 0
        for worker in workers:
            worker.holding = False
        await asyncio.gather(*requests)


async def test_stopping_router_removes_its_load(server: RedisServer) -> None:
    settings = redis_settings_at(server, lease_s=60.0)
    async with PublishingWorker("d0", settings), router(0, settings, live=1) as stays:
        async with router(1, settings, live=1):
            await until(lambda: stays.redis.num_peers == 1, "two routers")
        await until(lambda: stays.redis.num_peers == 0, "one router")
        assert server.do("ZCARD", KEYS.routers) == 1


async def test_departed_worker_leaves_no_keys(server: RedisServer) -> None:
    async with PublishingWorker("d0", redis_settings_at(server)) as worker:
        await until(lambda: server.do("DBSIZE") == 4, "notice, head, state, registry")
        worker.store([block(1)])
        await until(lambda: server.do("DBSIZE") == 5, "and the log")
    assert server.do("DBSIZE") == 0


async def test_restarted_worker_is_a_new_incarnation(server: RedisServer) -> None:
    settings = redis_settings_at(server)
    async with router(0, settings, live=0) as reader:
        async with PublishingWorker("d0", settings) as former:
            former.store([block(1), block(2)])
            await until(lambda: reader.agrees_with(former), "the first life")
        await until(lambda: not reader.registry.snapshots(), "its end")
        async with PublishingWorker("d0", settings, incarnation=2) as later:
            later.store([block(3)])
            await until(lambda: bool(reader.registry.snapshots()) and reader.agrees_with(later), "the second life")
            assert reader.registry.prefix_map.longest_prefix([block(1)]) == {}


async def test_redis_starting_last_is_used() -> None:
    with RedisServer() as server:
        server.kill()
        settings = redis_settings_at(server)
        async with PublishingWorker("d0", settings) as worker, router(0, settings, live=0) as reader:
            worker.store([block(1)])
            publishing, polling = worker.publisher._link.health, reader.redis.links
            await until(lambda: publishing.failures and any(link.failures for link in polling), "both have tried")
            server.start()
            await until(lambda: reader.agrees_with(worker) and bool(reader.knows(worker)), "found and followed")


async def test_wrong_redis_password_fails_no_request_and_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(password="hush-hush") as server:
        good, bad = redis_settings_at(server, password="hush-hush"), redis_settings_at(server, password="tell-nobody")
        async with PublishingWorker("d0", good) as worker, router(0, good, live=1) as reader:
            async with PublishingWorker("d1", bad), router(1, bad, live=0) as shut_out:
                await until(lambda: shut_out.redis.links[1].failures > 2, "refused")
                with pytest.raises(ServingError):
                    await shut_out.ask(prompt(1))
            assert await reader.ask(prompt(1)) == expected_tokens(prompt(1), count=8, seed=3)
            await until(lambda: reader.agrees_with(worker), "for those who may")
    assert "hush" not in caplog.text
    assert "tell-nobody" not in caplog.text
    failing = [record for record in caplog.records if "fails (poll)" in record.getMessage()]
    assert len(failing) == 1, "a change of state is logged, not each failure"


async def test_clusters_sharing_a_redis_are_isolated(server: RedisServer) -> None:
    ours, theirs = redis_settings_at(server), redis_settings_at(server, cluster="other")
    async with PublishingWorker("d0", ours) as worker, PublishingWorker("d0", theirs) as foreign_worker:
        worker.store([block(1)])
        foreign_worker.store([block(2)])
        async with router(0, ours, live=1) as reader:
            await until(lambda: reader.agrees_with(worker), "its own")
            assert {a.address for a in reader.redis.directory._addresses} == {worker.address}


async def test_worker_report_and_peer_load_add_up(server: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        workers, (first, second) = await two_of_each(stack, server)
        for worker in workers:
            worker.reporting = False
            worker.report(1000)
        for each in (first, second):
            await until(
                lambda of=each: all(s.load.report_number == 1000 for s in of.registry.snapshots()), "the last report"
            )
        key = first.registry.snapshots()[0].info.key
        sent = first.registry.assign(key, 50)
        await until(
            lambda: [s.info.key for s in second.registry.snapshots() if s.backlog_tokens == 50] == [key],
            "sent since that report",
        )
        share: Share = first.registry.in_flight()[0]
        assert (share.report_number, share.backlog_since) == (1000, 50)
        sent.end()


async def test_unencodable_load_is_skipped_and_ends_no_router(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        _, (first, second) = await two_of_each(stack, server)
        sent = first.registry.assign(first.registry.snapshots()[0].info.key, 50)
        (load,) = first.registry.in_flight()
        with monkeypatch.context() as patch:
            patch.setattr(first.registry, "in_flight", lambda: (replace(load, num_requests=-1),))
            await until(lambda: "because of an error in this router" in caplog.text, "the fault is logged")
            assert await first.ask(prompt(1)) == expected_tokens(prompt(1), count=8, seed=3)
        more = first.registry.assign(WorkerKey(*load.process), 7)
        await until(lambda: any(s.backlog_tokens == 57 for s in second.registry.snapshots()), "told again")
        assert caplog.text.count("because of an error in this router") == 1
        for each in (sent, more):
            each.end()


async def test_load_from_before_router_start_is_ignored(server: RedisServer) -> None:
    """An authentic message from before this router's start, replayed."""
    config = RouterConfig.model_validate({"limits": {"default": {"concurrent_requests": 2}}})
    limits = [make_limits(config, SECRET, lambda: 0.0) for _ in range(2)]
    former = Incarnation(1000)
    async with AsyncExitStack() as stack:
        settings = redis_settings_at(server)
        await stack.enter_async_context(PublishingWorker("d0", settings))
        first = await stack.enter_async_context(router(0, settings, live=1, limits=limits[0]))
        sent = first.registry.assign(first.registry.snapshots()[0].info.key, 50)
        limits[0].limiter.admit("", 10.0)
        sequence = first.redis._exchange._sequence
        await until(lambda: first.redis._exchange._sequence > sequence, "both are told")
        old = server.do("GET", KEYS.load(former))
        sent.end()
        await first.crash()
        second = await stack.enter_async_context(router(1, settings, live=1, limits=limits[1]))
        server.do("SET", KEYS.load(former), old)
        server.do("ZADD", KEYS.routers, 9e15, f"{former:x}")
        exchange = second.redis._exchange
        await until(lambda: exchange._others == (former,), "it looks as if the other were here")
        sequence = exchange._sequence
        await until(lambda: exchange._sequence > sequence + 1, "its load is read")
        assert (second.redis.num_peers, limits[1].limiter.num_elsewhere("")) == (0, 0)
        assert [s.backlog_tokens for s in second.registry.snapshots()] == [0]


async def test_routers_share_a_tenants_limits(server: RedisServer) -> None:
    config = RouterConfig.model_validate({"limits": {"default": {"concurrent_requests": 2}}})
    limits = [make_limits(config, SECRET, lambda: 0.0) for _ in range(2)]
    async with AsyncExitStack() as stack:
        settings = redis_settings_at(server)
        await stack.enter_async_context(PublishingWorker("d0", settings))
        first = await stack.enter_async_context(router(0, settings, live=1, limits=limits[0]))
        second = await stack.enter_async_context(router(1, settings, live=1, limits=limits[1]))
        for _ in range(2):
            limits[0].limiter.admit("", 10.0)
        await until(lambda: limits[1].limiter.num_elsewhere("") == 2, "the other router knows")
        with pytest.raises(Overloaded, match="concurrent_requests"):
            limits[1].limiter.admit("", 10.0)
        old = server.do("GET", KEYS.load(Incarnation(1000)))
        await first.crash()
        await until(lambda: limits[1].limiter.num_elsewhere("") == 0, "its lease has ended")
        server.do("SET", KEYS.load(Incarnation(1000)), old)
        exchange = second.redis._exchange
        sequence = exchange._sequence
        await until(lambda: exchange._sequence > sequence + 1, "its load was put back, and read")
        assert limits[1].limiter.num_elsewhere("") == 0
        limits[1].limiter.admit("", 10.0)
