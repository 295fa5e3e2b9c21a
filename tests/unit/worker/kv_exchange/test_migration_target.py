"""Inheriting a cache over a real engine thread and scheduler, with a hub scripted by each test."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from engine.scheduler.scheduler import Scheduler
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.messages import PrefillJob
from tandem.errors import TransferError, Unavailable
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, BlockId, Incarnation
from tandem.values.outputs import PhaseTimes
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, settled
from tests.unit.worker.kv_exchange.test_fetcher import HOLDER, FakeHub
from worker.engine_host import EngineHost
from worker.kv_exchange.fetch import Declined
from worker.kv_exchange.fetcher import Fetcher
from worker.kv_exchange.migration_target import MigrationTarget
from worker.session_port import SessionPort

WAIT_S = 20.0
TRUNK = [BlockHash(bytes([1, i]) + bytes(14)) for i in range(4)]
BRANCH = [BlockHash(bytes([2, i]) + bytes(14)) for i in range(2)]
OTHER = [BlockHash(bytes([3, i]) + bytes(14)) for i in range(3)]


def chain(names: Sequence[BlockHash], after: BlockHash | None = None) -> pb.CachedChain:
    return pb.CachedChain(after=after or ledger.ROOT, from_root=after is None, names=b"".join(names))


CHAINS = [chain(TRUNK), chain(BRANCH, after=TRUNK[1]), chain(OTHER)]


class Bench:
    def __init__(self, host: EngineHost, group: asyncio.TaskGroup) -> None:
        self.host = host
        self.host.rates.prefill_tokens_per_s = 1.0  # so slow that anything is worth fetching
        self.fetcher = Fetcher(host, name="d/1", spawn=group.create_task)
        self.hub = FakeHub()
        hub: Any = self.hub
        self.fetcher.hub = hub
        self.migration_target = MigrationTarget(host, self.fetcher, spawn=group.create_task)
        self.port = SessionPort(Incarnation(2))

    def migrate(
        self,
        chains: Sequence[pb.CachedChain] = CHAINS,
        *,
        leaver: str = "d9",
        port: SessionPort | None = None,
        **changes: Any,
    ) -> None:
        fields = {
            "holder": common.PrefixHolder(worker_id=leaver, incarnation=5, address="127.0.0.1:9"),
            "block_size": 16,
            "within_s": 60.0,
            **changes,
        }
        self.migration_target.migrate(port or self.port, pb.FetchCache(chains=chains, **fields))

    async def next_job(self) -> PrefillJob:
        async with asyncio.timeout(WAIT_S):
            return (await self.hub.jobs.get())[0]

    async def next_job_or_none(self) -> PrefillJob | None:
        """The next job once everything that can run has run, or None."""
        for _ in range(20):
            await settled(self.host)
        return None if self.hub.jobs.empty() else self.hub.jobs.get_nowait()[0]

    async def give(self, job: PrefillJob) -> None:
        blocks = (await self.fetcher.bind(job.transfer_id, job.num_blocks(ledger.BLOCK))).blocks
        info = CommitInfo(blocks=blocks, first_token=None, cached_tokens=0, times=PhaseTimes(), exposed_s=0.0)
        await self.fetcher.commit(job.transfer_id, info)

    async def answered(self, port: SessionPort | None = None) -> pb.CacheFetched:
        async with asyncio.timeout(WAIT_S):
            message = await (port or self.port).next()
        assert message is not None
        return message.cache_fetched

    async def held(self) -> set[BlockHash]:
        return await self.host.call(lambda scheduler: set(scheduler.blocks.index.names()))

    @property
    def counts(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.migration_target.num_blocks.items() if count}

    async def assert_empty(self) -> None:
        ledger.assert_empty(await settled(self.host))


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(**getattr(request, "param", {})), on_fatal=faults.append)
    host.start(on_output=lambda _output: None, ports=tuple)
    async with asyncio.TaskGroup() as group:
        yield Bench(host, group)
    await host.stop()
    assert not faults


async def test_migration_fetches_by_name_and_each_block_once(bench: Bench) -> None:
    bench.migrate()
    first, second = await bench.next_job(), await bench.next_job_or_none()
    assert first.fetch
    assert (first.names, first.held_tokens) == (tuple(TRUNK), 0)
    assert second is None, "the branch waits for what comes before it"
    await bench.give(first)
    jobs = [await bench.next_job(), await bench.next_job()]
    branch, other = sorted(jobs, key=lambda job: job.names[0])
    assert (branch.names, branch.held_tokens) == ((*TRUNK[:2], *BRANCH), 32)
    assert (other.names, other.held_tokens) == (tuple(OTHER), 0)
    await bench.give(other)
    await bench.give(branch)
    assert (await bench.answered()).worker_id == "d9"
    assert await bench.held() == {*TRUNK, *BRANCH, *OTHER}
    assert bench.counts == {"moved": 9}
    assert bench.fetcher.stats.started == 0, "no prompt waited"
    await bench.assert_empty()


async def test_migration_cached_blocks_are_not_fetched(bench: Bench) -> None:
    bench.migrate([chain(TRUNK)])
    await bench.give(await bench.next_job())
    await bench.answered()
    bench.migrate([chain(TRUNK)])
    await bench.answered()
    assert bench.hub.jobs.empty()
    assert bench.counts == {"moved": 4, "held": 4}
    await bench.assert_empty()


async def test_migration_blocks_cheaper_to_compute_are_skipped(bench: Bench) -> None:
    bench.host.rates.prefill_tokens_per_s = 0.0  # never measured here: what the router knows counts
    bench.migrate([chain(TRUNK)], prefill_tokens_per_s=1e9)
    await bench.answered()
    assert bench.counts == {"computed": 4}
    bench.migrate([chain(TRUNK)], prefill_tokens_per_s=1.0)
    await bench.give(await bench.next_job())
    await bench.answered()
    assert bench.counts == {"computed": 4, "moved": 4}
    await bench.assert_empty()


@pytest.mark.parametrize("num_taken", [24, 22, 18])
async def test_migration_uses_spare_room_only(bench: Bench, num_taken: int) -> None:
    """A quarter of 24 blocks stays available, however few are free."""
    taken = await bench.host.call(lambda scheduler: scheduler.blocks.allocate(num_taken))
    bench.migrate()
    await bench.answered()
    assert bench.hub.jobs.empty()
    assert bench.counts == {"no_room": 9}
    await bench.host.call(lambda scheduler: scheduler.blocks.release(taken))
    await bench.assert_empty()


def crowd(scheduler: Scheduler, num_cached: int) -> list[BlockId]:
    """Leaves one block free and so many cached; returns those in use."""
    blocks, parent = scheduler.blocks, ledger.ROOT
    in_use, cached = blocks.allocate(23 - num_cached), blocks.allocate(num_cached)
    for i, block in enumerate(cached):
        name = BlockHash(bytes([7, i]) + bytes(14))
        blocks.index.insert(name, block, parent=parent, is_first=i == 0)
        parent = name
    blocks.release(cached)
    return in_use


async def test_migration_chain_is_cut_to_spare_room(bench: Bench) -> None:
    in_use = await bench.host.call(
        lambda scheduler: crowd(scheduler, 13)
    )  # one is free, six of those that are cached may go
    long = [BlockHash(bytes([8, i]) + bytes(14)) for i in range(8)]
    bench.migrate([chain(long), chain(OTHER)])
    job = await bench.next_job()
    assert job.names == tuple(long[:7])
    await bench.give(job)
    await bench.answered()
    assert bench.counts == {"moved": 7, "no_room": 4}
    await bench.host.call(lambda scheduler: scheduler.blocks.release(in_use))
    await bench.assert_empty()


async def test_migration_source_lost_keeps_landed_blocks(bench: Bench) -> None:
    lone = [chain([BlockHash(bytes([9, i]) + bytes(14))]) for i in range(6)]
    bench.migrate([chain(TRUNK), *lone])
    jobs = [await bench.next_job(), await bench.next_job()]
    blocks = (await bench.fetcher.bind(jobs[0].transfer_id, 4)).blocks
    bench.fetcher.failed(jobs[0].transfer_id, blocks[:3], TransferError("gone"))
    bench.fetcher.released(jobs[0].transfer_id, blocks[3:])
    bench.fetcher.failed(jobs[1].transfer_id, (), TransferError("gone"))
    bench.hub.refusal = Unavailable("gone")
    assert (await bench.answered()).incarnation == 5
    assert await bench.held() == set(TRUNK[:3])
    assert bench.counts["moved"] == 3
    assert bench.counts["moved"] + bench.counts["failed"] == 10
    assert bench.hub.jobs.empty(), "the rest is not requested"
    await bench.assert_empty()


async def test_migration_timeout_counts_rest_as_no_time(bench: Bench) -> None:
    bench.migrate(within_s=0.2)
    job = await bench.next_job()
    blocks = (await bench.fetcher.bind(job.transfer_id, 4)).blocks
    bench.hub.on_give_up = lambda key: bench.fetcher.failed(key, blocks[:2], TransferError("too long"))
    await bench.answered()
    bench.fetcher.released(job.transfer_id, blocks[2:])
    await settled(bench.host)
    assert await bench.held() == set(TRUNK[:2])
    assert bench.counts == {"no_time": 9}
    await bench.assert_empty()


async def test_migration_draining_target_fetches_nothing(bench: Bench) -> None:
    bench.migrate()
    job = await bench.next_job()
    bench.migration_target.close()
    await bench.answered()
    with pytest.raises(TransferError):
        await bench.fetcher.bind(job.transfer_id, 4)
    bench.migrate()
    await bench.answered()
    assert bench.hub.jobs.empty()
    await bench.assert_empty()


async def test_migration_prompt_joins_running_fetch(bench: Bench) -> None:
    bench.migrate([chain(TRUNK)])
    job = await bench.next_job()
    prefetching = asyncio.create_task(
        bench.fetcher.prefetch(ledger.ROOT, TRUNK, HOLDER, prefill_tokens_per_s=1.0, spare_blocks=0)
    )
    await asyncio.sleep(0)
    await bench.give(job)
    assert await prefetching == 4
    await bench.answered()
    assert bench.hub.jobs.empty()
    await bench.assert_empty()


async def test_migration_larger_blocks_are_requested_by_source_names(bench: Bench) -> None:
    bench.migrate([chain(TRUNK)], block_size=32)
    await bench.answered()
    assert bench.hub.jobs.empty(), "blocks of 32 do not make up blocks of 16"
    bench.migration_target._host.parts.layout.block_size = 32
    bench.migrate([chain(TRUNK[:2])], block_size=32)
    job = await bench.next_job()
    assert job.names == (TRUNK[0], TRUNK[0], TRUNK[1], TRUNK[1])
    bench.fetcher.failed(job.transfer_id, (), TransferError("enough"))
    await bench.answered()
    await bench.assert_empty()


def line(number: int, count: int) -> list[BlockHash]:
    return [BlockHash(bytes([number]) + i.to_bytes(15, "big")) for i in range(count)]


LARGE = pytest.mark.parametrize("bench", [{"block_size": 64, "max_model_len": 4096}], indirect=True)
"""Four of the leaver's blocks are one here."""


@LARGE
async def test_migration_short_parent_is_fetched_with_child(bench: Bench) -> None:
    short, long = line(10, 3), line(11, 38)
    bench.migrate([chain(short), chain(long, after=short[1])])
    job = await bench.next_job()
    assert job.names == (*short[:2], *long), "40 names make up ten blocks"
    await bench.give(job)
    await bench.answered()
    assert bench.counts == {"moved": 10}
    assert await bench.held() == {job.names[i] for i in range(3, 40, 4)}
    await bench.assert_empty()


@LARGE
async def test_migration_whole_blocks_span_chain_boundaries(bench: Bench) -> None:
    first, second, third = line(10, 6), line(11, 3), line(12, 8)
    bench.migrate([chain(first), chain(second, after=first[-1]), chain(third, after=second[-1])])
    for length, held in ((4, 0), (8, 4), (16, 8)):
        job = await bench.next_job()
        assert job.names == (*first, *second, *third)[:length], "whole blocks and nothing more"
        assert job.held_tokens == 16 * held
        await bench.give(job)
    await bench.answered()
    assert bench.counts == {"moved": 4}
    await bench.assert_empty()


@LARGE
async def test_migration_child_of_cut_chain_is_skipped(bench: Bench) -> None:
    in_use = await bench.host.call(lambda scheduler: crowd(scheduler, 17))  # room for nine
    one, long = line(10, 4), line(11, 42)
    bench.migrate([chain(one), chain(long), chain(line(12, 9), after=long[-1])])
    jobs = sorted([await bench.next_job(), await bench.next_job()], key=lambda job: len(job.names))
    assert jobs[1].names == tuple(long[:32]), "eight blocks are left for ten"
    bench.fetcher.failed(jobs[0].transfer_id, (), TransferError("gives its room back"))
    await bench.give(jobs[1])
    await bench.answered()
    assert bench.hub.jobs.empty()
    assert bench.counts == {"failed": 1, "moved": 8, "no_room": 4}
    await bench.host.call(lambda scheduler: scheduler.blocks.release(in_use))
    await bench.assert_empty()


async def test_migration_chain_beyond_context_is_cut(bench: Bench) -> None:
    """199 tokens have twelve full blocks before them."""
    names = line(10, 400)
    chains = [chain(names[:1]), *(chain([name], after=before) for before, name in pairwise(names))]
    judged: list[int] = []
    prefetch = bench.fetcher.prefetch

    async def counting(root: BlockHash, names: Sequence[BlockHash], *args: Any, **kwargs: Any) -> int | Declined:
        judged.append(len(names))
        return await prefetch(root, names, *args, **kwargs)

    bench.fetcher.prefetch = counting  # type: ignore[method-assign]
    bench.migrate(chains)
    for _ in range(12):
        await bench.give(await bench.next_job())
    await bench.answered()
    assert judged == list(range(1, 13))
    assert bench.counts == {"moved": 12, "no_room": 388}
    await bench.assert_empty()


async def test_migration_timeout_while_queued_is_counted(bench: Bench) -> None:
    bench.migrate([chain(TRUNK)])
    job = await bench.next_job()
    bench.migrate([chain(OTHER)], leaver="d8", within_s=0.05)
    assert (await bench.answered()).worker_id == "d8"
    assert bench.counts == {"no_time": 3}
    await bench.give(job)
    assert (await bench.answered()).worker_id == "d9"
    assert bench.counts == {"no_time": 3, "moved": 4}
    await bench.assert_empty()


async def test_migration_repeated_order_joins_running_one(bench: Bench) -> None:
    """As from a second router after the loss of the first, which got the offer."""
    second = SessionPort(Incarnation(3))
    bench.migrate([chain(TRUNK)])
    job = await bench.next_job()
    for _ in range(1000):
        bench.migrate([chain(OTHER)])
        bench.migrate([chain(OTHER)], port=second)
    assert await bench.next_job_or_none() is None
    await bench.give(job)
    assert (await bench.answered()).worker_id == (await bench.answered(second)).worker_id == "d9"
    assert bench.counts == {"moved": 4}
    for port in (bench.port, second):
        port.finish()
        assert await port.next() is None, "once is enough"
    await bench.assert_empty()


async def test_migration_target_drained_at_once_still_answers(bench: Bench) -> None:
    bench.migrate()
    bench.migration_target.close()
    assert (await bench.answered()).worker_id == "d9"
    assert bench.counts == {"no_time": 9}
    await bench.assert_empty()
