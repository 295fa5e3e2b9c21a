"""Lending from lower tiers over a real engine: restored blocks are held like the rest, with the same bytes."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.assembly import assemble
from engine.scheduler.scheduler import Scheduler
from engine.spec import EngineSpec
from engine.types.request import Request
from engine.types.tier_counts import TierCounts
from kv_transfer.protocol.messages import PrefillJob
from tandem.errors import Unavailable
from tandem.values.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.unit.engine.kv_cache.tiers.test_cache import BLOCK, CHEAP_COPY, ROOT, Given, prompt, sizes, tiny
from worker.engine_host import EngineHost
from worker.kv_exchange import lender
from worker.kv_exchange.lender import Lender

__all__ = ["sizes"]
WAIT_S = 60.0
TRANSFER = TransferId("t")


class Bench:
    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.lender = Lender(host)
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.lent: asyncio.Queue[tuple[list[BlockHash], list[BlockId]]] = asyncio.Queue()
        hub: Any = Hub(self)
        self.lender.hub = hub

    async def compute(self, k: int) -> None:
        tokens = prompt(k)
        request = Request(
            request_id=RequestId(f"{k}"),
            token_ids=array("i", tokens),
            num_prompt_tokens=len(tokens),
            params=SamplingParams(max_tokens=2, ignore_eos=True),
            hash_root=ROOT,
        )
        await self.host.call(lambda scheduler: scheduler.add(request))
        async with asyncio.timeout(WAIT_S):
            assert await self.ended.get() == request.request_id

    def names(self, k: int) -> tuple[BlockHash, ...]:
        names: list[BlockHash] = []
        self.host.parts.hasher.extend(ROOT, names, prompt(k))
        return tuple(names)

    async def in_pool(self, k: int) -> int:
        names = self.names(k)
        return await self.host.call(lambda s: sum(s.blocks.index.find(name) is not None for name in names))

    async def content(self, blocks: Sequence[BlockId]) -> Any:
        return await self.host.call(lambda _: self.host.parts.runner.kv_cache.blocks[:, list(blocks)].clone())

    async def blocks_of(self, k: int) -> list[BlockId]:
        names = self.names(k)
        return await self.host.call(lambda s: [s.blocks.index.find(name) for name in names])

    async def lend(self, k: int, held_tokens: int = 0) -> list[BlockId]:
        await self.lender.submit(self.job(k, held_tokens))
        async with asyncio.timeout(WAIT_S):
            names, blocks = await self.lent.get()
        assert tuple(names) == self.names(k)
        return blocks

    def job(self, k: int, held_tokens: int = 0) -> PrefillJob:
        return PrefillJob(
            transfer_id=TRANSFER,
            request_id=RequestId("r"),
            token_ids=(),
            num_prompt_tokens=0,
            names=self.names(k),
            held_tokens=held_tokens,
            sampling=SamplingParams(max_tokens=1),
            hash_root=ROOT,
            fetch=True,
            resume=True,
        )

    async def counts(self) -> TierCounts:
        return (await self.host.call(lambda scheduler: scheduler.tiers.counts()))[0]

    async def check(self) -> None:
        await self.host.call(lambda scheduler: scheduler.check_invariants())
        assert await self.host.call(lambda scheduler: scheduler.blocks.pool.num_used) == 0


class Hub:
    """A hub that records what is lent."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def answer_fetch(self, _transfer_id: TransferId, names: list[BlockHash], blocks: Sequence[BlockId]) -> None:
        self._bench.lent.put_nowait((names, list(blocks)))


@asynccontextmanager
async def lending_from(spec: EngineSpec) -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    parts = await asyncio.to_thread(assemble, spec)
    assert parts.scheduler.tiers is not None
    parts.scheduler.tiers.costs = Given(block_bytes=1, block_tokens=BLOCK)
    parts.scheduler.tiers.costs.rates = CHEAP_COPY
    host = EngineHost(parts, on_fatal=faults.append)
    bench = Bench(host)
    host.start(
        on_output=lambda output: [bench.ended.put_nowait(e.request_id) for e in output.events if e.finish_reason],
        ports=tuple,
    )
    yield bench
    await host.stop()
    assert not faults


def evict_tail(scheduler: Scheduler) -> None:
    """As a hand-off does that takes five blocks and frees them."""
    scheduler.blocks.promise(5)
    scheduler.blocks.release(scheduler.blocks.allocate_promised(5))


async def test_lending_prefix_in_host_memory_is_lent(sizes, monkeypatch):
    monkeypatch.setattr(lender, "_PROMOTE_BYTES", 2 * sizes[0])  # two blocks between two steps
    async with lending_from(tiny(sizes, host=24, num_blocks=9)) as bench:
        await bench.compute(1)
        computed = await bench.content(await bench.blocks_of(1))
        for k in range(2, 5):
            await bench.compute(k)
        assert await bench.in_pool(1) == 0
        blocks = await bench.lend(1)
        assert len(blocks) == 6
        assert (await bench.content(blocks)).equal(computed)
        assert await bench.host.call(lambda s: [s.blocks.pool.num_refs(block) for block in blocks]) == [1] * 6
        bench.lender.release(TRANSFER)
        await bench.check()


async def test_lending_prefix_held_in_pool_is_extended(sizes):
    async with lending_from(tiny(sizes, host=24, num_blocks=9)) as bench:
        await bench.compute(1)
        computed = await bench.content(await bench.blocks_of(1))
        await bench.host.call(evict_tail)
        assert 0 < await bench.in_pool(1) < 6
        blocks = await bench.lend(1, held_tokens=32)
        assert (await bench.content(blocks)).equal(computed)
        bench.lender.release(TRANSFER)
        await bench.check()


async def test_lending_keeps_a_quarter_of_the_pool_available(sizes):
    async with lending_from(tiny(sizes, host=24, num_blocks=9)) as bench:
        await bench.compute(1)
        for k in range(2, 5):
            await bench.compute(k)
        taken = await bench.host.call(lambda scheduler: scheduler.blocks.allocate(4))
        blocks = await bench.lend(1)
        assert len(blocks) == 3, "of nine blocks four are in use, and a quarter stays available"
        bench.lender.release(TRANSFER)
        await bench.host.call(lambda scheduler: scheduler.blocks.release(taken))
        await bench.check()


async def test_lending_prefix_on_disk_is_read_and_lent(sizes, tmp_path: Path):
    spec = tiny(sizes, host=12, disk=60, path=tmp_path, num_blocks=9)
    async with lending_from(spec) as bench:
        await bench.compute(1)
        computed = await bench.content(await bench.blocks_of(1))
    async with lending_from(spec) as bench:  # another process: all that is left is on disk
        assert await bench.in_pool(1) == 0
        blocks = await bench.lend(1)
        assert len(blocks) == 6
        assert (await bench.content(blocks)).equal(computed)
        bench.lender.release(TRANSFER)
        await bench.check()


@pytest.mark.parametrize("ends", ["by itself", "with who asked", "with who asked at once"])
async def test_lending_unresponsive_disk_ends_in_time(sizes, tmp_path: Path, monkeypatch, ends):
    spec = tiny(sizes, host=12, disk=60, path=tmp_path, num_blocks=9)
    async with lending_from(spec) as bench:
        await bench.compute(1)
    monkeypatch.setattr(lender, "_PROMOTE_S", 0.05 if ends == "by itself" else 10 * WAIT_S)
    async with lending_from(spec) as bench:
        free = threading.Event()
        assert bench.host.parts.disk is not None
        for _ in range(2):
            bench.host.parts.disk._readers.submit(free.wait, WAIT_S)
        lifting, next_read = asyncio.Event(), bench.host.next_read
        monkeypatch.setattr(bench.host, "next_read", lambda: lifting.set() or next_read())
        response = asyncio.create_task(bench.lender.submit(bench.job(1)))
        if ends == "with who asked":
            async with asyncio.timeout(WAIT_S):
                await lifting.wait()
        if ends != "by itself":
            await asyncio.sleep(0)
            bench.lender.on_unwanted(TRANSFER)
        try:
            with pytest.raises(Unavailable):
                async with asyncio.timeout(WAIT_S / 4):
                    await response
        finally:
            free.set()
        assert lifting.is_set() == (ends != "with who asked at once"), "nothing is begun for nobody"
        assert bench.lender.num_loans == 0
        await bench.check()


async def test_lending_counts_hits_and_misses_once_over_slices(sizes, monkeypatch):
    monkeypatch.setattr(lender, "_PROMOTE_BYTES", sizes[0])
    async with lending_from(tiny(sizes, host=24, num_blocks=9)) as bench:
        for k in range(1, 5):
            await bench.compute(k)
        assert await bench.in_pool(1) == 0
        before = await bench.counts()
        await bench.lend(1)
        bench.lender.release(TRANSFER)
        after = await bench.counts()
        assert (after.hits - before.hits, after.misses - before.misses) == (6, 0)
        with pytest.raises(Unavailable):
            await bench.lender.submit(bench.job(9))
        missed = await bench.counts()
        assert (missed.hits - after.hits, missed.misses - after.misses) == (0, 6), "found nowhere"
        await bench.check()
