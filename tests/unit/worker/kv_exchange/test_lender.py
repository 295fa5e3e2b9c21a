"""Lending over a real engine thread and scheduler."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from engine.scheduler.scheduler import Scheduler
from kv_transfer.protocol.messages import PrefillJob
from tandem.errors import InvalidRequest, Unavailable
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, settled
from worker.engine_host import EngineHost
from worker.kv_exchange.lender import Lender
from worker.kv_exchange.owners import OutgoingTransfers

WAIT_S = 20.0
PROMPT = tuple((7 * i) % 90 for i in range(75))
NAMES: list[BlockHash] = []
BlockHasher(ledger.SECRET).extend(ledger.ROOT, NAMES, PROMPT)


class FakeHub:
    def __init__(self) -> None:
        self.lending: asyncio.Queue[tuple[list[BlockHash], Sequence[BlockId]]] = asyncio.Queue()

    def answer_fetch(self, _transfer_id: TransferId, names: Sequence[BlockHash], blocks: Sequence[BlockId]) -> None:
        self.lending.put_nowait((list(names), blocks))


class Bench:
    def __init__(self, host: EngineHost, stepped: asyncio.Event) -> None:
        self.host = host
        self.stepped = stepped
        self.lender = Lender(host)
        self.hub = FakeHub()
        hub: Any = self.hub
        self.lender.hub = hub

    async def cache(self) -> None:
        """Compute the prompt, so that its blocks are in the cache."""
        request = ledger.request(PROMPT, params=SamplingParams(max_tokens=1, ignore_eos=True))
        await self.host.call(lambda scheduler: scheduler.add(request))
        async with asyncio.timeout(WAIT_S):
            self.stepped.clear()
            while await self.host.call(lambda s: s.match_prefix(ledger.request(PROMPT))) < 64:
                await self.stepped.wait()
                self.stepped.clear()


def job(**changes: Any) -> PrefillJob:
    fields = {
        "transfer_id": TransferId("t"),
        "request_id": RequestId("r"),
        "token_ids": (),
        "num_prompt_tokens": 0,
        "names": tuple(NAMES),
        "held_tokens": 16,
        "sampling": SamplingParams(max_tokens=1),
        "hash_root": ledger.ROOT,
        "fetch": True,
        "resume": True,
    }
    return PrefillJob(**{**fields, **changes})


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    stepped = asyncio.Event()
    host.start(on_output=lambda _output: stepped.set(), ports=tuple)
    yield Bench(host, stepped)
    await host.stop()
    assert not faults


def refs(scheduler: Scheduler, blocks: Sequence[BlockId]) -> list[int]:
    return [scheduler.blocks.pool.num_refs(block) for block in blocks]


async def test_lender_prefix_is_held_until_read(bench: Bench) -> None:
    await bench.cache()
    await bench.lender.submit(job())
    names, blocks = await bench.hub.lending.get()
    assert len(blocks) == 4
    assert len(names) == 4
    assert await bench.host.call(lambda scheduler: refs(scheduler, blocks)) == [1] * 4
    assert bench.lender.num_loans == 1
    bench.lender.release(TransferId("t"))
    assert not bench.lender.owns(TransferId("t"))
    ledger.assert_empty(await settled(bench.host))


async def test_lender_blocks_still_loading_are_not_reported(bench: Bench) -> None:
    await bench.cache()
    requested: list[list[BlockId]] = []

    def is_arriving(blocks: Sequence[BlockId]) -> bool:
        assert bench.hub.lending.empty()
        requested.append(list(blocks))
        return len(requested) < 3

    await bench.host.call(lambda scheduler: setattr(scheduler, "is_arriving", is_arriving))
    await bench.lender.submit(job())
    _, blocks = await bench.hub.lending.get()
    assert requested == [list(blocks)] * 3
    bench.lender.release(TransferId("t"))
    ledger.assert_empty(await settled(bench.host))


async def test_lender_absent_prefix_is_refused(bench: Bench) -> None:
    with pytest.raises(Unavailable):
        await bench.lender.submit(job())
    await bench.cache()
    with pytest.raises(Unavailable):
        await bench.lender.submit(job(held_tokens=64))
    assert bench.lender.num_loans == 0
    ledger.assert_empty(await settled(bench.host))


async def test_lender_only_worker_refuses_prefill(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="only serves fetches"):
        await OutgoingTransfers(bench.lender).submit(job(fetch=False, token_ids=PROMPT))


async def test_lender_loan_returned_early_is_not_reported(bench: Bench) -> None:
    await bench.cache()
    await bench.lender.submit(job())
    bench.lender.release(TransferId("t"))
    await asyncio.sleep(0)
    assert bench.hub.lending.empty()
    ledger.assert_empty(await settled(bench.host))
