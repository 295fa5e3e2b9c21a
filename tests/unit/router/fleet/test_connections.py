"""The fleet's connections under a changing directory."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

from router.fleet.connections import WorkerFleet
from tandem.backoff import Backoff
from tandem.rpc.cluster_grpc import Channels
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
        self._said.put_nowait(frozenset(WorkerAddress(role=WorkerRole.DECODE, address=w.address) for w in workers))

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        while True:
            yield await self._said.get()
            self.num_heard += 1

    async def until_heard(self, count: int) -> None:
        while self.num_heard < count:  # noqa: ASYNC110 - the fleet tells nobody
            await asyncio.sleep(0.001)


def fleet(directory: Changing, registry: WatchedRegistry) -> WorkerFleet:
    return WorkerFleet(
        directory=directory,
        listener=registry,
        open_channel=Channels(None).open,
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
