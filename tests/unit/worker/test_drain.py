"""A worker's drain: notified peers, its duration, and the order of stopping."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protocol.chain_wire import chains_from_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts
from worker.drain import MigrationSource, leave
from worker.engine_host import EngineHost
from worker.kv_exchange.service import Fabric
from worker.session_port import SessionPort

WAIT_S = 20.0
PROMPT = tuple((7 * i) % 90 for i in range(75))


class Bench:
    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.ports = [SessionPort(Incarnation(number)) for number in (8, 7)]
        self.migration_source = MigrationSource(host, lambda: self.ports)

    async def offer(self, port: SessionPort) -> pb.CacheOffer:
        async with asyncio.timeout(WAIT_S):
            message = await port.next()
        assert message is not None
        return message.cache_offer


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    ended = asyncio.Event()
    host = EngineHost(parts(), on_fatal=faults.append)
    host.start(on_output=lambda output: ended.set() if output.events else None, ports=tuple)
    request = ledger.request(PROMPT, params=SamplingParams(max_tokens=1, ignore_eos=True))
    await host.call(lambda scheduler: scheduler.add(request))
    await ended.wait()
    yield Bench(host)
    await host.stop()
    assert not faults


async def test_cache_offer_goes_to_one_router_at_a_time(bench: Bench) -> None:
    leaving = asyncio.create_task(bench.migration_source.offer_cache(60.0))
    eight, seven = bench.ports
    offer = await bench.offer(seven)
    (chain,) = chains_from_pb(offer.chains)
    assert (chain.from_root, chain.after, len(chain.names)) == (True, ledger.ROOT, 4)
    assert 59.0 < offer.lends_s <= 60.0
    bench.migration_source.migration_ended(eight)  # it got no offer
    seven.close()
    assert len((await bench.offer(eight)).chains) == 1
    bench.migration_source.migration_ended(eight)
    await leaving


async def test_cache_offer_ends_at_its_deadline(bench: Bench) -> None:
    await bench.migration_source.offer_cache(0.05)
    assert len((await bench.offer(bench.ports[1])).chains) == 1


@pytest.mark.parametrize("lacks", ["time", "routers", "cache"])
async def test_cache_offer_without_time_routers_or_cache_is_not_sent(bench: Bench, lacks: str) -> None:
    if lacks == "routers":
        for port in bench.ports:
            port.close()
    if lacks == "cache":
        await bench.host.call(lambda scheduler: scheduler.blocks.clear_cache())
    async with asyncio.timeout(WAIT_S):
        await bench.migration_source.offer_cache(0.0 if lacks == "time" else 3600.0)
    for port in bench.ports:
        port.finish()
        assert await port.next() is None


class Stages:
    """A worker whose stages end when a test says so."""

    def __init__(self) -> None:
        self.stages_seen: list[str] = []
        self.finished, self.offered, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        target = SimpleNamespace(close=lambda: self.stages_seen.append("close"))
        self.fabric: Any = SimpleNamespace(migration_target=target, drain=self._stage("drain", self.drained))
        self.migration_source: Any = SimpleNamespace(offer_cache=self._stage("offer_cache", self.offered))

    def _stage(self, name: str, ended: asyncio.Event) -> Callable[..., Awaitable[None]]:
        async def stage(*_: Any) -> None:
            self.stages_seen.append(name)
            await ended.wait()
            self.stages_seen.append(f"{name} ended")

        return stage

    def leave(self, *, drain_s: float, migration_s: float) -> "asyncio.Task[None]":
        self.finish = self._stage("finish", self.finished)
        return asyncio.create_task(leave(self, drain_s=drain_s, migration_s=migration_s))


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_drain_finishes_work_then_migrates_cache_then_lends() -> None:
    stages = Stages()
    leaving = stages.leave(drain_s=60.0, migration_s=5.0)
    await turns()
    assert stages.stages_seen == ["close", "finish"]
    stages.finished.set()
    await turns()
    assert stages.stages_seen == ["close", "finish", "finish ended", "offer_cache"]
    stages.offered.set()
    await turns()
    assert stages.stages_seen[4:] == ["offer_cache ended", "drain"]
    stages.drained.set()
    await leaving


async def test_drain_busy_with_work_still_offers_cache_in_time() -> None:
    stages = Stages()
    leaving = stages.leave(drain_s=60.0, migration_s=60.0)
    await turns()
    assert stages.stages_seen == ["close", "finish", "offer_cache"]
    stages.offered.set()
    await turns()
    assert "drain" not in stages.stages_seen
    stages.finished.set()
    stages.drained.set()
    await leaving


async def test_drain_returns_at_deadline() -> None:
    stages = Stages()
    async with asyncio.timeout(WAIT_S):
        await stages.leave(drain_s=0.05, migration_s=0.01)
    assert "drain" not in stages.stages_seen


async def test_drain_waits_for_senders_before_receivers() -> None:
    """A prompt may begin a fetch while it is here: receivers are awaited after senders."""
    stages_seen: list[str] = []
    prompt_left = asyncio.Event()

    class Hub:
        def __init__(self, name: str, ended: asyncio.Event | None) -> None:
            self.name, self.ended = name, ended

        async def drain(self) -> None:
            stages_seen.append(self.name)
            if self.ended is not None:
                await self.ended.wait()

    sends: Any = Hub("sends", prompt_left)
    receives: Any = Hub("receives", None)
    nothing: Any = None
    fabric = Fabric(
        sender_hub=sends,
        receiver_hub=receives,
        fetcher=nothing,
        lender=nothing,
        migration_target=nothing,
        transports=(),
    )
    draining = asyncio.create_task(fabric.drain())
    await turns()
    assert stages_seen == ["sends"]
    prompt_left.set()
    await draining
    assert stages_seen == ["sends", "receives"]
