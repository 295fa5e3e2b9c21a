"""Workers that a router reports as reachable, and their addresses from the configuration."""

import asyncio
import logging

from msgspec.structs import replace

from router.fleet import reachable_workers
from router.fleet.configured_workers import ConfiguredWorkers
from router.fleet.reachable_workers import ReachableWorkers
from tandem.rpc.worker_directory import ChangingDirectory, stated_addresses
from tests.support.router.worker_views import worker

NOBODY = stated_addresses(prefill=[], decode=[])


class Registry:
    """Workers that join, drain and leave at the test's command."""

    def __init__(self, *workers):
        self.workers = {one.info.key: one for one in workers}
        self.watchers = []

    def snapshots(self):
        return list(self.workers.values())

    def keys(self):
        return set(self.workers)

    def find(self, key):
        return self.workers.get(key)

    def watch(self, callback):
        self.watchers.append(callback)

    def unwatch(self, callback):
        self.watchers.remove(callback)

    def put(self, one):
        self.workers[one.info.key] = one
        self.tell()

    def remove(self, one):
        del self.workers[one.info.key]
        self.tell()

    def tell(self):
        for callback in list(self.watchers):
            callback()


class Canary:
    """Workers that give a token when allowed."""

    def __init__(self):
        self.probed = asyncio.Queue()
        self.alive = set()

    async def probe(self, key):
        await self.probed.put(key)
        return key in self.alive


def reached_workers(registry, canary, published):
    def addresses():
        return {key: f"{key.worker_id}:1" for key in registry.workers}

    return ReachableWorkers(
        registry,
        canary,
        addresses=addresses,
        publish=lambda published_state: published.put_nowait(published_state["reaches"]),
    )


async def test_joining_decode_worker_is_reachable_after_a_token(monkeypatch):
    monkeypatch.setattr(reachable_workers, "_AGAIN_S", 0.0)
    old, new = worker("d0"), worker("d1")
    registry, canary, published = Registry(old), Canary(), asyncio.Queue()
    async with reached_workers(registry, canary, published):
        registry.put(new)
        for _ in range(2):  # it is asked again and again
            assert await canary.probed.get() == new.info.key
        assert published.get_nowait() == ["d0:1"]
        assert published.empty()
        canary.alive.add(new.info.key)
        assert await published.get() == ["d0:1", "d1:1"]
        registry.put(replace(old, draining=True))
        registry.put(worker("p0"))
        registry.remove(old)
        assert await published.get() == ["d1:1", "p0:1"]  # all changes in one message
    assert published.empty()
    assert registry.watchers == []


async def test_unexpected_canary_error_is_retried(monkeypatch, caplog):
    monkeypatch.setattr(reachable_workers, "_AGAIN_S", 0.0)

    class Broken(Canary):
        async def probe(self, key):
            if await super().probe(key):
                return True
            raise ZeroDivisionError

    new, registry, canary, published = worker("d1"), Registry(), Broken(), asyncio.Queue()
    async with reached_workers(registry, canary, published):
        registry.put(new)
        for _ in range(2):
            await canary.probed.get()
        canary.alive.add(new.info.key)
        while await published.get() != ["d1:1"]:
            pass
    assert "the canary for d1 failed" in caplog.text


async def test_token_of_any_request_proves_full_worker(monkeypatch):
    monkeypatch.setattr(reachable_workers, "_AGAIN_S", 0.0)
    new, registry, canary, published = worker("d1"), Registry(), Canary(), asyncio.Queue()
    async with reached_workers(registry, canary, published):
        registry.put(new)
        await canary.probed.get()
        registry.put(replace(new, answered_s=new.answered_s + 1.0))
        while await published.get() != ["d1:1"]:
            pass


async def test_departed_worker_is_not_probed_again(monkeypatch):
    monkeypatch.setattr(reachable_workers, "_AGAIN_S", 0.0)
    registry, canary, published = Registry(), Canary(), asyncio.Queue()
    async with reached_workers(registry, canary, published) as watching:
        new = worker("d1")
        registry.put(new)
        await canary.probed.get()
        (probing,) = watching._asking.values()
        registry.remove(new)
        await probing
        assert canary.probed.qsize() <= 1
    assert [published.get_nowait() for _ in range(published.qsize())] == [[]]


async def test_configured_workers_follow_file_and_reject_malformed_ones(tmp_path, caplog):
    path, applied, called = tmp_path / "cluster.yaml", [], asyncio.Event()

    def apply(addresses):
        applied.append(addresses)
        called.set()

    path.write_text('decode: {addresses: ["a:1", "b:2"]}\nprefill: {addresses: ["c:3"]}\n')
    workers = ConfiguredWorkers(path, apply)
    await asyncio.to_thread(workers.read)
    await called.wait()
    assert applied == [stated_addresses(prefill=["c:3"], decode=["a:1", "b:2"])]
    for wrong in ('decode: {addresses: ["a:1", "a:1"]}', "nonsense: 1"):
        path.write_text(wrong)
        with caplog.at_level(logging.ERROR):
            await asyncio.to_thread(workers.read)
    path.unlink()
    await asyncio.to_thread(workers.read)
    assert len(applied) == 1
    assert len(caplog.records) == 3
    await asyncio.to_thread(ConfiguredWorkers(None, apply).read)


async def test_late_directory_watcher_sees_newest_state():
    directory = ChangingDirectory(NOBODY)
    newest = stated_addresses(prefill=[], decode=["a:1"])
    directory.replace(newest)
    watching = directory.watch()
    assert await anext(watching) == newest
    await watching.aclose()
