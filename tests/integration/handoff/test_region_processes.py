"""Hand-offs between workers each of whose ranks is a process with a pool that nobody else can map, over tcp."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kv_transfer.regions.wire import RegionEnds
from tandem.errors import ConfigError
from tests.integration.handoff.test_lanes import SIZES, settled
from tests.support.kv_transfer.handoff_fakes import WAIT_S, begin, make_job
from tests.support.kv_transfer.ranked_pool import (
    SMALL_CHUNKS,
    RankedPair,
    RankedPool,
    open_pair,
    open_prefill,
    ranked_layout,
)
from tests.support.kv_transfer.region_process import RegionProcess, open_regions, region_process

IMPATIENT = replace(SMALL_CHUNKS, lease_s=0.4, drain_s=0.1, stall_s=1.5)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Ranked:
    pair: RankedPair
    here: list[RegionProcess]
    there: list[RegionProcess]


@asynccontextmanager
async def ranked(tp_source: int, tp_target: int, settings=SMALL_CHUNKS, heads: int = 4) -> AsyncIterator[Ranked]:
    here, there = (RankedPool(ranked_layout(tp, heads=heads), 40) for tp in (tp_source, tp_target))
    async with AsyncExitStack() as stack:
        sending, unused, here_processes = await open_regions(stack, here)
        _unused, receiving, there_processes = await open_regions(stack, there)
        for region in (unused[0],):
            stack.callback(region.close)
        pair = await open_pair(stack, (here, there), sending, receiving, settings)
        yield Ranked(pair, here_processes, there_processes)


@pytest.mark.parametrize(("tp_source", "tp_target"), SIZES)
async def test_processes_hand_a_prompt_over(tp_source: int, tp_target: int) -> None:
    async with ranked(tp_source, tp_target) as cluster:
        pair = cluster.pair
        for name, num_tokens, held in (("a", 37, 0), ("b", 50, 16)):
            job = make_job(name, num_tokens, held_tokens=held)
            transfer = begin(pair.hub, pair.decode, job, pair.prefill.route(1))
            record = await pair.decode.until(transfer, lambda r: r.committed or r.errors)
            assert not record.errors
        await settled(pair)


async def test_processes_with_replicated_heads_hand_a_prompt_over() -> None:
    async with ranked(2, 4, heads=2) as cluster:
        pair = cluster.pair
        transfer = begin(pair.hub, pair.decode, make_job("a", 37), pair.prefill.route(1))
        await pair.decode.until(transfer, lambda r: r.committed or r.errors)
        assert not pair.decode.records[transfer].errors
        await settled(pair)


async def test_many_hand_offs_share_the_processes() -> None:
    async with ranked(2, 2) as cluster:
        pair = cluster.pair
        jobs = [make_job(f"j{i}", 5 + 3 * i % 11) for i in range(16)]
        transfers = [begin(pair.hub, pair.decode, job, pair.prefill.route(1)) for job in jobs[:6]]
        for transfer in transfers:
            await pair.decode.until(transfer, lambda r: r.committed)
        await settled(pair)


async def test_cancel_frees_the_blocks_of_all_processes() -> None:
    async with ranked(2, 2) as cluster:
        pair = cluster.pair
        pair.prefill.owner.gate.clear()
        pair.prefill.owner.gate_after_tokens = 16
        transfer = begin(pair.hub, pair.decode, make_job("a", 40), pair.prefill.route(1))
        await until(lambda: pair.decode.records[transfer].bound)
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await settled(pair)


async def started(pair: RankedPair, name: str = "a"):
    """A hand-off of which four blocks have landed in all lanes, and whose prompt is not computed any further."""
    pair.prefill.owner.gate.clear()
    pair.prefill.owner.gate_after_tokens = 16
    transfer = begin(pair.hub, pair.decode, make_job(name, 40), pair.prefill.route(1))
    before = pair.hub.stats.num_bytes
    await until(lambda: pair.hub.stats.num_bytes - before >= 4 * ranked_layout(1).worker_block_bytes)
    return transfer


async def test_killed_rank_of_the_sender_is_replaced_from_landed_blocks() -> None:
    async with ranked(2, 2) as cluster, AsyncExitStack() as stack:
        pair = cluster.pair
        again = RankedPool(ranked_layout(4), 40)
        sending, receiving, _processes = await open_regions(stack, again)
        stack.callback(receiving[0].close)
        other = await open_prefill(stack, again, sending, SMALL_CHUNKS, incarnation=12)
        transfer = await started(pair)
        cluster.here[0].kill()
        pair.prefill.owner.gate.set()
        record = await pair.decode.until(transfer, lambda r: r.errors)
        assert len(record.landed) == 4
        pair.hub.reroute(transfer, other.route(2))
        record = await pair.decode.until(transfer, lambda r: r.committed)
        assert len(record.bound) == 10 + 6, "what had landed is not sent again"
        await settled(pair)
        await until(lambda: len(again.free) == again.num_blocks)


async def test_killed_rank_of_the_receiver_commits_nothing() -> None:
    async with ranked(2, 2) as cluster:
        pair = cluster.pair
        transfer = await started(pair)
        cluster.there[0].kill()
        pair.prefill.owner.gate.set()
        record = await pair.decode.until(transfer, lambda r: r.errors)
        assert not record.committed
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await settled(pair)


async def test_frozen_rank_of_the_receiver_keeps_its_blocks_in_quarantine() -> None:
    """One lane is proven at once; blocks are in both."""
    async with ranked(2, 2, IMPATIENT) as cluster:
        pair = cluster.pair
        transfer = await started(pair)
        cluster.there[0].stop()
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await until(lambda: pair.decode.quarantined)
        assert pair.hub.stats.quarantined_blocks == 10
        assert len(pair.decode.pool.free) == 30
        await until(lambda: len(pair.prefill.owner.pool.free) == 40)
        cluster.there[0].go_on()
        await settled(pair)


async def test_frozen_rank_of_the_receiver_that_dies_frees_its_blocks() -> None:
    async with ranked(2, 2, IMPATIENT) as cluster:
        pair = cluster.pair
        transfer = await started(pair)
        cluster.there[0].stop()
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await until(lambda: pair.decode.quarantined)
        cluster.there[0].kill()
        await settled(pair)


async def test_frozen_rank_of_the_sender_keeps_its_sources_and_no_destinations() -> None:
    """Over tcp a revocation is proven without the writer; what the writer reads is not freed before it answers."""
    async with ranked(2, 2, IMPATIENT) as cluster:
        pair = cluster.pair
        transfer = await started(pair)
        cluster.here[0].stop()
        pair.prefill.owner.gate.set()
        record = await pair.decode.until(transfer, lambda r: r.errors)
        assert len(record.landed) == 4
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await until(lambda: len(pair.decode.pool.free) == 40)
        assert len(pair.prefill.owner.pool.free) == 30
        cluster.here[0].go_on()
        await settled(pair)


async def test_transport_that_cannot_work_in_a_rank_is_refused_by_name() -> None:
    pool = RankedPool(ranked_layout(2), 4)
    with pytest.raises(
        ConfigError, match=r"rank 1: transfer.transport is 'shm', which needs a KV pool in shared memory"
    ):
        async with region_process(pool, 1, RegionEnds(transport="shm", host="127.0.0.1")):
            raise AssertionError("opened")
