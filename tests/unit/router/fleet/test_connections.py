"""The fleet's connections under a changing directory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random

import grpc.aio
import pytest

from router.fleet.connections import WorkerFleet
from router.fleet.session_carriers import Connect
from tandem.backoff import Backoff
from tandem.errors import ConfigError
from tandem.rpc.cluster_grpc import ChannelOpener, ClusterChannels
from tandem.rpc.worker_directory import WorkerAddress
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import WatchedRegistry, session_settings


class Changing:
    """A WorkerDirectory whose content the test sets."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[frozenset[WorkerAddress]] = asyncio.Queue()
        self.num_heard = 0

    def say(self, *workers: FakeWorker) -> None:
        self.name(*(worker.address for worker in workers))

    def name(self, *addresses: str) -> None:
        self._said.put_nowait(frozenset(WorkerAddress(role=WorkerRole.DECODE, address=one) for one in addresses))

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        while True:
            yield await self._said.get()
            self.num_heard += 1

    async def until_heard(self, count: int) -> None:
        while self.num_heard < count:  # noqa: ASYNC110 - the fleet tells nobody
            await asyncio.sleep(0.001)


def fleet(
    directory: Changing,
    registry: WatchedRegistry,
    open_channel: ChannelOpener | None = None,
    connect: Connect | None = None,
    knock: Callable[[str], Awaitable[None]] | None = None,
) -> WorkerFleet:
    return WorkerFleet(
        directory=directory,
        listener=registry,
        open_channel=open_channel or ClusterChannels(None).open,
        connect=connect,
        knock=knock,
        settings=session_settings(),
        rng=Random(1),
        backoff=Backoff(first_s=0.01, most_s=0.02),
    )


async def test_session_outlives_its_forgotten_address() -> None:
    directory, registry = Changing(), WatchedRegistry()
    async with FakeWorker("d0") as worker, fleet(directory, registry) as sessions:
        directory.say(worker)
        await registry.until_live(1)
        directory.say()
        directory.say()
        await directory.until_heard(2)
        assert len(registry.snapshots()) == 1
        await worker.crash()
        await registry.until_live(0)
        await worker.start()
        while sessions._keepers:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert registry.snapshots() == []
        directory.say(worker)
        await registry.until_live(1)


async def test_successor_of_worker_that_died_before_its_ticket_gets_direct_session() -> None:
    directory, registry, worker = Changing(), WatchedRegistry(), FakeWorker("d0")
    num_tries, num_channels, has_given_up = 0, 0, asyncio.Event()

    async def connect(address: str, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            await worker.crash()
            raise ConnectionRefusedError("nobody listens")
        await ClusterChannels(None).connect(address, make_protocol)

    def open_channel(address: str) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        nonlocal num_channels
        num_channels += 1
        if num_channels == 2:
            has_given_up.set()
        return ClusterChannels(None).open(address)

    async with worker, fleet(directory, registry, open_channel, connect):
        directory.say(worker)
        await has_given_up.wait()  # also over gRPC
        await worker.start()
        await registry.until_live(1)
        assert registry.snapshots()[0].info.is_direct


async def test_channel_to_lost_worker_is_opened_again_only_when_somebody_listens() -> None:
    directory, registry, worker = Changing(), WatchedRegistry(), FakeWorker("d0")
    channels, opened, knocks = ClusterChannels(None), [], asyncio.Queue[str]()

    async def knock(address: str) -> None:
        knocks.put_nowait(address)
        await channels.knock(address)

    def open_channel(address: str) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        opened.append(address)
        return channels.open(address)

    async with worker, fleet(directory, registry, open_channel, knock=knock):
        directory.say(worker)
        await registry.until_live(1)
        await worker.crash()
        await registry.until_live(0)
        for _ in range(20):
            assert await knocks.get() == worker.address
        assert opened == [worker.address]
        await worker.start()
        await registry.until_live(1)
        assert opened == [worker.address] * 2


async def test_address_that_is_none_ends_nothing_but_its_own_attempts() -> None:
    directory, registry, channels, tries = Changing(), WatchedRegistry(), ClusterChannels(None), asyncio.Queue[str]()

    async def knock(address: str) -> None:
        tries.put_nowait(address)
        await channels.knock(address)

    async with FakeWorker("d0") as worker, fleet(directory, registry, knock=knock):
        directory.name("a..b:9000", worker.address)
        await registry.until_live(1)
        for _ in range(3):
            assert await tries.get() == "a..b:9000"
        assert len(registry.snapshots()) == 1


@pytest.mark.parametrize("is_direct", [True, False])
async def test_channel_of_hello_is_closed_once_the_session_has_moved(is_direct: bool) -> None:
    directory, registry, channels, closed = Changing(), WatchedRegistry(), ClusterChannels(None), []

    @asynccontextmanager
    async def open_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
        async with channels.open(address) as channel:
            yield channel
        closed.append(address)

    connect = channels.connect if is_direct else None
    async with FakeWorker("d0") as worker, fleet(directory, registry, open_channel, connect):
        directory.say(worker)
        await registry.until_live(1)
        assert registry.snapshots()[0].info.is_direct is is_direct
        assert closed == [worker.address] * is_direct


async def test_address_returning_in_time_is_kept() -> None:
    directory, registry = Changing(), WatchedRegistry()
    async with FakeWorker("d0") as worker, fleet(directory, registry):
        directory.say(worker)
        await registry.until_live(1)
        directory.say()
        directory.say(worker)
        await directory.until_heard(2)
        assert registry.num_left == 0
        await worker.crash()
        await registry.until_live(0)
        await worker.start()
        await registry.until_live(1)


async def test_forgotten_unreached_address_is_not_dialled() -> None:
    directory, registry = Changing(), WatchedRegistry()
    worker = FakeWorker("d0", port=1)
    async with fleet(directory, registry) as sessions:
        directory.say(worker)
        directory.say()
        directory.say()
        await directory.until_heard(2)
        assert not sessions._keepers


async def until_logged(logs: pytest.LogCaptureFixture, beginning: str) -> str:
    while not (found := [one.message for one in logs.records if one.message.startswith(beginning)]):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)
    return found[0]


async def test_worker_beyond_loopback_that_the_directory_names_is_not_reached_in_the_clear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, registry, far = Changing(), WatchedRegistry(), "192.0.2.1:7001"
    async with FakeWorker("d0") as worker, fleet(directory, registry):
        directory.say(worker)
        await registry.until_live(1)
        directory.name(worker.address, far)
        told = await until_logged(caplog, f"no session with {far}: ")
        assert "cluster.tls: 192.0.2.1 is beyond loopback, and traffic with it would not be encrypted" in told
        assert [each.info.key.worker_id for each in registry.snapshots()] == ["d0"]


async def test_channel_that_does_not_open_is_tried_again() -> None:
    directory, registry, num_tried = Changing(), WatchedRegistry(), 0

    @asynccontextmanager
    async def fails_twice(address: str) -> AsyncIterator:
        nonlocal num_tried
        num_tried += 1
        if num_tried <= 2:
            raise ConfigError("cluster.tls: no certificates") if num_tried == 1 else OSError("no file descriptors")
        async with ClusterChannels(None).open(address) as channel:
            yield channel

    async with FakeWorker("d0") as worker, fleet(directory, registry, fails_twice):
        directory.say(worker)
        await registry.until_live(1)
        assert num_tried == 3
