"""Whole hand-offs between workers whose pools are in one region per rank: all regions in this process."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest

from kv_transfer.layout.lanes import lanes_between
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.regions.local import LocalReceivingRegion, LocalSendingRegion
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.interface import KVReceiver, KVSender, PeerWriter, WriteOrder, WriteResult
from tandem.errors import TransferError
from tests.support.kv_transfer.handoff_fakes import BLOCK, WAIT_S, begin, make_job
from tests.support.kv_transfer.ranked_pool import (
    SMALL_CHUNKS,
    RankedPair,
    RankedPool,
    open_pair,
    open_prefill,
    ranked_layout,
)

SIZES = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2))


async def settled(pair: RankedPair) -> None:
    """Every block of both pools is free and nothing is left anywhere."""
    async with asyncio.timeout(WAIT_S):
        await pair.hub.drain()
        while pair.prefill.hub.num_transfers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for pool in (pair.decode.pool, pair.prefill.owner.pool):
        assert len(pool.free) == pool.num_blocks
    assert not pair.decode.quarantined
    assert pair.hub.stats.quarantined_blocks == 0


class Ends:
    """Opens the ends of regions of this process, over one transport."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.fabric = MemoryFabric()

    def senders(self, region: KVRegion) -> tuple[KVSender, ...]:
        return open_senders(region, choice=self.transport, fabric=self.fabric)

    def receivers(self, region: KVRegion) -> tuple[KVReceiver, ...]:
        return open_receivers(region, choice=self.transport, fabric=self.fabric)


async def open_here(
    stack: AsyncExitStack,
    ends: Ends,
    here: RankedPool,
    there: RankedPool,
    settings: TransferSettings = SMALL_CHUNKS,
    senders: Callable[[int, KVRegion], tuple[KVSender, ...]] | None = None,
) -> RankedPair:
    """Open both workers with all regions in this process."""
    make = senders or (lambda _index, region: ends.senders(region))
    sending = [LocalSendingRegion(region, make(index, region)) for index, region in enumerate(here.regions)]
    receiving = [LocalReceivingRegion(region, ends.receivers(region)) for region in there.regions]
    return await open_pair(stack, (here, there), sending, receiving, settings)


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize(("tp_source", "tp_target"), SIZES)
async def test_lanes_hand_a_prompt_over(transport: str, tp_source: int, tp_target: int) -> None:
    is_mappable = transport == "shm"
    here, there = (RankedPool(ranked_layout(tp), 40, is_mappable=is_mappable) for tp in (tp_source, tp_target))
    async with AsyncExitStack() as stack:
        pair = await open_here(stack, Ends(transport), here, there)
        for name, num_tokens, held in (("a", 37, 0), ("b", 50, 16)):
            job = make_job(name, num_tokens, held_tokens=held)
            record = await pair.decode.until(
                begin(pair.hub, pair.decode, job, pair.prefill.route(1)), lambda r: r.committed or r.errors
            )
            assert not record.errors
        await settled(pair)
        num_blocks = -(-37 // BLOCK) + -(-50 // BLOCK) - 16 // BLOCK
        assert pair.hub.stats.num_bytes == num_blocks * ranked_layout(1).worker_block_bytes
        assert pair.hub.stats.bad_messages == 0


@pytest.mark.parametrize(("source", "target"), [((4, 4), (4, 4)), ((4, 4), (1, 1)), ((1, 1), (4, 4)), ((4, 2), (4, 1))])
async def test_lanes_of_replicated_heads_fill_every_rank(source: tuple[int, int], target: tuple[int, int]) -> None:
    """Two heads on four ranks; (ranks, regions) of either side."""
    here, there = (RankedPool(ranked_layout(tp, num_regions=regions, heads=2), 40) for tp, regions in (source, target))
    async with AsyncExitStack() as stack:
        pair = await open_here(stack, Ends("tcp"), here, there)
        transfer = begin(pair.hub, pair.decode, make_job("a", 37), pair.prefill.route(1))
        await pair.decode.until(transfer, lambda r: r.committed)
        await settled(pair)


async def test_lanes_of_a_fetch_end_at_the_same_block() -> None:
    here, there = (RankedPool(ranked_layout(2), 40) for _ in range(2))
    async with AsyncExitStack() as stack:
        pair = await open_here(stack, Ends("memory"), here, there)
        lanes = lanes_between(here.layout, there.layout)
        assert [(lane.source, lane.destination) for lane in lanes] == [(0, 0), (1, 1)]
        transfer = begin(pair.hub, pair.decode, make_job("a", 33, resume=True), pair.prefill.route(1))
        record = await pair.decode.until(transfer, lambda r: r.committed)
        assert record.committed.first_token is None
        await settled(pair)


# Trouble in one lane


@dataclass
class Bent:
    """A sender of one lane whose writes `handle` may replace."""

    inner: KVSender
    handle: Callable[[PeerWriter, WriteOrder], "Future[WriteResult]"]

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def one_sided(self) -> bool:
        return self.inner.one_sided

    def reaches(self, offer) -> bool:
        return self.inner.reaches(offer)

    def connect(self, offer, pairing) -> "BentWriter":
        return BentWriter(self.inner.connect(offer, pairing), self.handle)


class BentWriter:
    def __init__(self, inner: PeerWriter, handle) -> None:
        self._inner, self._handle = inner, handle

    @property
    def closed(self) -> bool:
        return self._inner.closed

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        return self._handle(self._inner, order)

    def cancel(self, key: TransferKey) -> bool:
        return self._inner.cancel(key)

    def close(self) -> None:
        self._inner.close()


def bend_region(ends: Ends, bent: int, handle):
    """Senders of which those of one region are bent."""

    def make(index: int, region: KVRegion) -> tuple[KVSender, ...]:
        inner = ends.senders(region)
        return tuple(Bent(one, handle) for one in inner) if index == bent else inner

    return make


@pytest.mark.parametrize("bent", [0, 1])
async def test_damage_in_one_lane_is_written_again_there(bent: int) -> None:
    here, there = (RankedPool(ranked_layout(2), 40) for _ in range(2))
    ends, damaged = Ends("tcp"), []

    def handle(writer: PeerWriter, order: WriteOrder) -> "Future[WriteResult]":
        written = writer.write(order)
        if damaged:
            return written
        damaged.append(order.cells)
        wrong: Future[WriteResult] = Future()
        written.add_done_callback(lambda f: wrong.set_result(replace(f.result(), checksum=f.result().checksum ^ 1)))
        return wrong

    async with AsyncExitStack() as stack:
        pair = await open_here(stack, ends, here, there, senders=bend_region(ends, bent, handle))
        transfer = begin(pair.hub, pair.decode, make_job("a", 37), pair.prefill.route(1))
        await pair.decode.until(transfer, lambda r: r.committed)
        await settled(pair)
    assert pair.hub.stats.nacks == 1
    assert damaged[0].first_head == 2 * bent


@pytest.mark.parametrize("broken", [0, 1])
async def test_attempt_is_resumed_at_the_last_block_that_all_lanes_have(broken: int) -> None:
    """One lane fails after its second chunk, while the other goes on to the end."""
    here, there = (RankedPool(ranked_layout(2), 40) for _ in range(2))
    ends, count, stuck = Ends("tcp"), [], []

    def handle(writer: PeerWriter, order: WriteOrder) -> "Future[WriteResult]":
        count.append(order)
        if len(count) <= 2:
            return writer.write(order)
        stuck.append(Future())
        return stuck[-1]

    settings = replace(SMALL_CHUNKS, write_window=64)
    async with AsyncExitStack() as stack:
        pair = await open_here(stack, ends, here, there, settings, senders=bend_region(ends, broken, handle))
        job = make_job("a", 40)
        transfer = begin(pair.hub, pair.decode, job, pair.prefill.route(1))
        async with asyncio.timeout(WAIT_S):
            while pair.hub.stats.num_bytes < 12 * here.layout.block_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for future in stuck:
            future.set_exception(TransferError("the lane is gone"))
        record = await pair.decode.until(transfer, lambda r: r.errors)
        assert "the lane is gone" in record.errors[0].message
        # A chunk of a lane is one block.
        assert SMALL_CHUNKS.chunk_bytes == here.layout.block_bytes
        assert len(record.landed) == 2
        pair.hub.cancel(transfer)
        pair.decode.end(transfer)
        await settled(pair)


async def test_attempt_goes_on_with_a_peer_of_other_regions() -> None:
    """Landed from two ranks, continued from four."""
    here, there = RankedPool(ranked_layout(2), 40), RankedPool(ranked_layout(2), 40)
    again = RankedPool(ranked_layout(4), 40)
    ends = Ends("tcp")
    async with AsyncExitStack() as stack:
        pair = await open_here(stack, ends, here, there)
        other = await open_prefill(
            stack,
            again,
            [LocalSendingRegion(region, ends.senders(region)) for region in again.regions],
            SMALL_CHUNKS,
            incarnation=12,
        )
        pair.prefill.owner.gate.clear()
        pair.prefill.owner.gate_after_tokens = 16
        transfer = begin(pair.hub, pair.decode, make_job("a", 40), pair.prefill.route(1))
        async with asyncio.timeout(WAIT_S):
            while pair.hub.stats.num_bytes < 4 * ranked_layout(1).worker_block_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pair.hub.give_up(transfer, "cut")
        record = await pair.decode.until(transfer, lambda r: r.errors)
        assert len(record.landed) == 4
        pair.hub.reroute(transfer, other.route(2))
        record = await pair.decode.until(transfer, lambda r: r.committed)
        assert len(record.bound) == 10 + 6
        await settled(pair)
