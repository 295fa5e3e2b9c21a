"""Fetching over a real engine thread and scheduler, with a hub scripted by each test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.types.request import Request
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.peer import Route
from kv_transfer.session.stats import TransferStats
from tandem.errors import Overloaded, TransferError
from tandem.values.ids import BlockId, Incarnation, TransferId, WorkerId
from tandem.values.outputs import PhaseTimes
from tandem.values.prefix_holder import PrefixHolder
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, settled
from worker.engine_host import EngineHost
from worker.kv_exchange.fetch import Declined
from worker.kv_exchange.fetcher import Fetcher

WAIT_S = 20.0
BLOCK = ledger.BLOCK
PROMPT = tuple((7 * i) % 90 for i in range(75))
HOLDER = PrefixHolder(worker_id=WorkerId("decode-1"), incarnation=Incarnation(5), address="127.0.0.1:9", num_tokens=64)


class FakeHub:
    """Records calls; a test plays the peer."""

    def __init__(self) -> None:
        self.stats = TransferStats()
        self.rate = 0.0
        self.jobs: asyncio.Queue[tuple[PrefillJob, Route]] = asyncio.Queue()
        self.cancelled: list[TransferId] = []
        self.on_give_up: Callable[[TransferId], None] = lambda _transfer_id: None
        self.refusal: Overloaded | None = None

    def start(self, job: PrefillJob, route: Route) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.put_nowait((job, route))

    def bytes_per_s(self, _address: str, _incarnation: Incarnation) -> float:
        return self.rate

    def cancel(self, transfer_id: TransferId, _reason: str = "") -> None:
        self.cancelled.append(transfer_id)

    def give_up(self, transfer_id: TransferId, _reason: str) -> None:
        self.on_give_up(transfer_id)


class Bench:
    def __init__(self, host: EngineHost, group: asyncio.TaskGroup) -> None:
        self.host = host
        self.host.rates.prefill_tokens_per_s = 1.0  # so slow that anything is worth fetching
        self.fetcher = Fetcher(host, name="p/1", spawn=group.create_task)
        self.hub = FakeHub()
        hub: Any = self.hub
        self.fetcher.hub = hub

    def request(self, prompt: tuple[int, ...] = PROMPT) -> Request:
        return ledger.request(prompt)

    def fetch(self, holder: PrefixHolder = HOLDER, request: Request | None = None) -> "asyncio.Task[int]":
        return asyncio.create_task(self.fetcher.fetch(request or self.request(), holder))

    async def prefetch(self, spare_blocks: int = 0) -> int | Declined:
        request = self.request()
        self.host.parts.hasher.extend(request.hash_root, request.block_hashes, request.token_ids)
        names = request.block_hashes[:4]
        return await self.fetcher.prefetch(
            request.hash_root, names, HOLDER, prefill_tokens_per_s=1.0, spare_blocks=spare_blocks
        )

    async def next_job(self) -> PrefillJob:
        async with asyncio.timeout(WAIT_S):
            return (await self.hub.jobs.get())[0]

    async def held(self) -> int:
        """Tokens of the prompt's prefix that are in the cache."""
        return await self.host.call(lambda scheduler: scheduler.match_prefix(self.request()))

    async def assert_empty(self) -> None:
        ledger.assert_empty(await settled(self.host))


def commit(blocks: tuple[BlockId, ...]) -> CommitInfo:
    return CommitInfo(blocks=blocks, first_token=None, cached_tokens=0, times=PhaseTimes(), exposed_s=0.0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    host.start(on_output=lambda _output: None, ports=tuple)
    async with asyncio.TaskGroup() as group:
        yield Bench(host, group)
    await host.stop()
    assert not faults


async def test_fetcher_fetched_prefix_is_found_as_cache(bench: Bench) -> None:
    fetching = bench.fetch()
    job = await bench.next_job()
    assert (job.fetch, job.resume, job.held_tokens) == (True, True, 0)
    assert (job.token_ids, job.num_tokens) == ((), 64), "a prefix is requested by its names"
    assert job.expected_tail(64) == job.names[3]
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    assert len(blocks) == 4
    await bench.fetcher.commit(job.transfer_id, commit(blocks))
    assert await fetching == 64
    assert await bench.held() == 64
    assert (bench.fetcher.stats.completed, bench.fetcher.stats.num_tokens) == (1, 64)
    await bench.assert_empty()


async def test_fetcher_requests_only_missing_blocks_and_accepts_fewer(bench: Bench) -> None:
    fetching = bench.fetch(replace(HOLDER, num_tokens=16))
    first = await bench.next_job()
    await bench.fetcher.commit(first.transfer_id, commit((await bench.fetcher.bind(first.transfer_id, 1)).blocks))
    assert await fetching == 16
    fetching = bench.fetch()
    job = await bench.next_job()
    assert job.held_tokens == 16
    blocks = (await bench.fetcher.bind(job.transfer_id, 2)).blocks
    await bench.fetcher.commit(job.transfer_id, commit(blocks))
    assert await fetching == 32
    assert await bench.held() == 48
    await bench.assert_empty()


@pytest.mark.parametrize("num_landed", [0, 2, 4])
async def test_fetcher_failure_keeps_landed_blocks_and_quarantines_rest(bench: Bench, num_landed: int) -> None:
    fetching = bench.fetch()
    job = await bench.next_job()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    landed, loose = blocks[:num_landed], blocks[num_landed:]
    bench.fetcher.failed(job.transfer_id, landed, TransferError("gone"))
    assert await fetching == num_landed * BLOCK
    assert await bench.held() == num_landed * BLOCK
    await asyncio.sleep(0)
    assert bench.hub.cancelled == [job.transfer_id]
    quarantined = await bench.host.call(lambda scheduler: scheduler.reservations.num_quarantined_blocks)
    assert bool(quarantined) == bool(loose)
    if loose:
        bench.fetcher.released(job.transfer_id, loose)
    await bench.assert_empty()


async def test_fetcher_overdue_fetch_is_given_up_and_landed_blocks_kept(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 1000.0
    fetching = bench.fetch()
    job = await bench.next_job()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    bench.hub.on_give_up = lambda key: bench.fetcher.failed(key, blocks[:3], TransferError("too long"))
    assert await fetching == 48
    await asyncio.sleep(0)
    assert bench.hub.cancelled == [job.transfer_id]
    assert await bench.held() == 48
    assert await bench.host.call(lambda scheduler: scheduler.reservations.num_quarantined_blocks)
    bench.fetcher.released(job.transfer_id, blocks[3:])
    await bench.assert_empty()


async def test_fetcher_slow_fetch_is_cancelled(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 1000.0
    fetching = bench.fetch()
    job = await bench.next_job()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    assert await fetching == 0
    await asyncio.sleep(0)
    assert bench.hub.cancelled == [job.transfer_id]
    assert await bench.held() == 0
    bench.fetcher.released(job.transfer_id, blocks)
    await bench.assert_empty()


async def test_fetcher_shared_prefix_is_fetched_once(bench: Bench) -> None:
    first = bench.fetch()
    job = await bench.next_job()
    second, third = bench.fetch(), bench.fetch()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    await bench.fetcher.commit(job.transfer_id, commit(blocks))
    assert [await first, await second, await third] == [64, 0, 0]
    assert bench.hub.jobs.empty()
    assert await bench.held() == 64
    await bench.assert_empty()


async def test_fetcher_simultaneous_requests_fetch_prefix_once(bench: Bench) -> None:
    fetching = [bench.fetch() for _ in range(3)]
    prefetching = asyncio.create_task(bench.prefetch())
    job = await bench.next_job()
    await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 4)).blocks))
    assert [await each for each in fetching] == [64, 0, 0]
    assert await prefetching == 4
    assert bench.hub.jobs.empty()
    assert bench.fetcher.stats.started == 1
    await bench.assert_empty()


async def test_fetcher_simultaneous_fetches_are_limited_to_eight(bench: Bench) -> None:
    prompts = [tuple((7 * i + k) % 90 for i in range(17)) for k in range(1, 13)]
    fetching = [bench.fetch(request=bench.request(prompt)) for prompt in prompts]
    jobs = [await bench.next_job() for _ in range(8)]
    for job in jobs:
        await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 1)).blocks))
    assert sorted([await each for each in fetching]) == [0] * 4 + [16] * 8
    assert (bench.fetcher.stats.started, bench.fetcher.stats.declined) == (8, 4)
    assert bench.hub.jobs.empty()
    another = bench.fetch()
    job = await bench.next_job()
    await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 4)).blocks))
    assert await another == 64, "a finished fetch makes room for others"
    await bench.assert_empty()


async def test_fetcher_joined_request_of_declined_fetch_is_priced_itself(bench: Bench) -> None:
    prefetching = asyncio.create_task(bench.prefetch(spare_blocks=10_000))
    await asyncio.sleep(0)
    fetching = [bench.fetch() for _ in range(2)]
    job = await bench.next_job()
    assert await prefetching is Declined.NO_ROOM
    await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 4)).blocks))
    assert sorted([await each for each in fetching]) == [0, 64]
    assert bench.hub.jobs.empty()
    bench.host.rates.prefill_tokens_per_s = 1e9
    other = tuple(reversed(PROMPT))
    assert await asyncio.gather(*(bench.fetch(request=bench.request(other)) for _ in range(3))) == [0, 0, 0]
    assert bench.fetcher.stats.declined == 3
    await bench.assert_empty()


async def test_fetcher_joined_request_keeps_reservation_of_cancelled_first(bench: Bench) -> None:
    first = bench.request()
    going, staying = bench.fetch(request=first), bench.fetch()
    await asyncio.sleep(0)
    bench.fetcher.abandon(first.request_id)
    assert await going == 0
    job = await bench.next_job()
    await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 4)).blocks))
    assert await staying == 0
    assert await bench.held() == 64
    await bench.assert_empty()


async def test_fetcher_late_commit_keeps_nothing(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 1000.0
    fetching = bench.fetch()
    job = await bench.next_job()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    assert await fetching == 0
    await bench.fetcher.commit(job.transfer_id, commit(blocks))
    assert await bench.held() == 0
    await bench.assert_empty()


async def test_fetcher_last_waiter_gone_ends_fetch(bench: Bench) -> None:
    fetching = bench.fetch()
    job = await bench.next_job()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    with pytest.raises(TransferError):
        await bench.fetcher.bind(job.transfer_id, 4)
    await bench.assert_empty()


async def test_fetcher_hub_refusal_costs_nothing(bench: Bench) -> None:
    bench.hub.refusal = Overloaded("too many")
    assert await bench.fetch() == 0
    await bench.assert_empty()


async def test_fetcher_cheaper_to_compute_or_no_room_is_not_fetched(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 1e9
    assert await bench.fetch() == 0
    bench.host.rates.prefill_tokens_per_s = 0.0
    assert await bench.fetch() == 0
    bench.host.rates.prefill_tokens_per_s = 1.0
    assert await bench.fetch(replace(HOLDER, num_tokens=15)) == 0
    await bench.host.call(lambda scheduler: scheduler.blocks.promise(scheduler.blocks.num_available))
    assert await bench.fetch() == 0
    await bench.host.call(lambda scheduler: scheduler.blocks.unpromise(scheduler.blocks.num_promised))
    assert bench.fetcher.stats.declined == 4
    assert bench.fetcher.stats.started == 0
    await bench.assert_empty()


async def test_fetcher_decides_by_peers_own_rate(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 1000.0  # 64 tokens, of a KiB for 16, in 64 ms
    bench.hub.rate = 1e4
    assert await bench.fetch() == 0
    assert bench.fetcher.stats.declined == 1
    bench.hub.rate = 1e6
    fetching = bench.fetch()
    job = await bench.next_job()
    await bench.fetcher.commit(job.transfer_id, commit((await bench.fetcher.bind(job.transfer_id, 4)).blocks))
    assert await fetching == 64
    await bench.assert_empty()


async def test_fetcher_ends_fetch_with_last_prompt_and_keeps_landed_blocks(bench: Bench) -> None:
    first, second = bench.request(), bench.request()
    fetching = bench.fetch(request=first)
    job = await bench.next_job()
    also = bench.fetch(request=second)
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    bench.hub.on_give_up = lambda key: bench.fetcher.failed(key, blocks[:2], TransferError("unwanted"))
    bench.fetcher.abandon(first.request_id)
    assert await fetching == 0
    assert bench.fetcher.stats.failed == 0, "another prompt waits for the same"
    bench.fetcher.abandon(second.request_id)
    assert await also == 0
    await asyncio.sleep(0)
    assert bench.hub.cancelled == [job.transfer_id]
    assert await bench.held() == 32
    bench.fetcher.released(job.transfer_id, blocks[2:])
    await bench.assert_empty()


async def test_fetcher_cancel_before_reservation_leaves_nothing(bench: Bench) -> None:
    request = bench.request()
    fetching = bench.fetch(request=request)
    await asyncio.sleep(0)
    bench.fetcher.abandon(request.request_id)
    assert await fetching == 0
    fetching = bench.fetch()
    await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await bench.assert_empty()


async def test_fetcher_abandon_unknown_request_does_nothing(bench: Bench) -> None:
    bench.fetcher.abandon(bench.request().request_id)
    await bench.assert_empty()


async def test_fetcher_with_windowed_layers_apart_asks_the_engine_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout: Any = bench.host.parts.layout
    layout.windowed_layers = (0,)
    monkeypatch.setattr(bench.host, "call", lambda _fn: pytest.fail("a prompt waits for a turn of the engine"))
    assert await bench.fetch() == 0
    assert await bench.prefetch() is Declined.COMPUTED
    assert bench.hub.jobs.empty()
