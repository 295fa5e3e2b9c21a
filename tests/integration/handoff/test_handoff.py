"""Whole hand-offs over real gRPC and real transports, with fake engines."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest

from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from tandem.errors import RequestTooLarge, TransferError, Unavailable
from tandem.values.ids import BlockHash, Incarnation
from tests.support.kv_transfer.handoff_fakes import (
    BLOCK,
    LAYOUT,
    SETTINGS,
    DecodeOwner,
    Pool,
    Prefill,
    begin,
    decode_worker,
    make_job,
    prefill_worker,
)
from tests.support.kv_transfer.transport_needs import require

DEADLINE_S = 20.0


@dataclass
class Cluster:
    hub: ReceiverHub
    decode: DecodeOwner
    prefill: Prefill

    async def settled(self) -> None:
        """Every block of both pools is free and nothing is left anywhere."""
        async with asyncio.timeout(DEADLINE_S):
            await self.hub.drain()
            while self.prefill.hub.num_transfers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(self.decode.pool.free) == self.decode.pool.num_blocks
        assert len(self.prefill.owner.pool.free) == self.prefill.owner.pool.num_blocks
        assert not self.decode.quarantined
        assert self.hub.stats.quarantined_blocks == 0


@pytest.fixture(params=["memory", "shm", "nixl", "torch_dist", "tcp"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    require(request.param)
    fabric = MemoryFabric()
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            prefill_worker(lambda region: open_senders(region, choice=request.param, fabric=fabric), pool=Pool(64))
        )
        hub, decode = await stack.enter_async_context(
            decode_worker(lambda region: open_receivers(region, choice=request.param, fabric=fabric), pool=Pool(48))
        )
        yield Cluster(hub, decode, prefill)


@pytest.mark.parametrize(("num_tokens", "held_tokens"), [(37, 0), (64, 0), (1, 0), (4, 0), (50, 16), (33, 32)])
async def test_handoff_transfers_prompt_and_first_token(cluster: Cluster, num_tokens: int, held_tokens: int) -> None:
    job = make_job("a", num_tokens, held_tokens=held_tokens)
    transfer = begin(cluster.hub, cluster.decode, job, cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.committed)
    [first_token] = record.tokens
    assert first_token.token.token_id == sum(job.token_ids) % 1000
    assert len(record.bound) == -(-num_tokens // BLOCK) - held_tokens // BLOCK
    assert record.committed.cached_tokens == 4
    assert record.committed.times.prefill_s == 0.5
    await cluster.settled()
    assert cluster.hub.stats.committed == 1
    assert cluster.hub.stats.seconds == pytest.approx(cluster.prefill.hub.stats.seconds)
    assert cluster.hub.stats.bytes_per_s == pytest.approx(cluster.prefill.hub.stats.bytes_per_s)
    assert cluster.hub.stats.bytes_per_s > 0.0
    assert cluster.hub.stats.num_bytes == len(record.bound) * LAYOUT.block_bytes == cluster.prefill.hub.stats.num_bytes


async def test_handoff_resumed_prompt_samples_no_token(cluster: Cluster) -> None:
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 20, resume=True), cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.committed)
    assert record.tokens == []
    assert record.committed.first_token is None
    await cluster.settled()


async def test_handoff_first_token_does_not_wait_for_kv(cluster: Cluster) -> None:
    cluster.decode.bind_gate.clear()
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 30), cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.tokens)
    assert not record.bound
    cluster.decode.bind_gate.set()
    await cluster.decode.until(transfer, lambda r: r.committed)
    await cluster.settled()


async def test_handoff_writes_chunks_while_prompt_is_computed(cluster: Cluster) -> None:
    cluster.prefill.owner.gate.clear()
    cluster.prefill.owner.gate_after_tokens = 24
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 40), cluster.prefill.route(1))
    async with asyncio.timeout(DEADLINE_S):
        while cluster.hub.stats.num_bytes < 6 * LAYOUT.block_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not cluster.decode.records[transfer].tokens
    cluster.prefill.owner.gate.set()
    await cluster.decode.until(transfer, lambda r: r.committed)
    await cluster.settled()


@pytest.mark.parametrize("gate_after", [0, 16])
async def test_handoff_cancel_reaches_prefill_worker(cluster: Cluster, gate_after: int) -> None:
    cluster.prefill.owner.gate.clear()
    cluster.prefill.owner.gate_after_tokens = gate_after
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 40), cluster.prefill.route(1))
    async with asyncio.timeout(DEADLINE_S):
        while len(cluster.decode.records[transfer].bound) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cluster.hub.cancel(transfer)
        cluster.decode.end(transfer)
        await cluster.prefill.owner.aborted[transfer].wait()
    await cluster.settled()
    assert not cluster.decode.records[transfer].errors


async def test_handoff_cancel_during_binding_frees_blocks(cluster: Cluster) -> None:
    cluster.decode.bind_gate.clear()
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 30), cluster.prefill.route(1))
    await cluster.decode.until(transfer, lambda r: r.tokens)
    cluster.hub.cancel(transfer)
    cluster.decode.end(transfer)
    cluster.decode.bind_gate.set()
    await cluster.settled()


async def test_handoff_refusals_name_their_reason(cluster: Cluster) -> None:
    transfer = begin(cluster.hub, cluster.decode, make_job("big", 65 * BLOCK), cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.errors)
    assert isinstance(record.errors[0], RequestTooLarge)
    cluster.hub.cancel(transfer)
    transfer = begin(cluster.hub, cluster.decode, make_job("full", 60 * BLOCK), cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.errors)
    assert isinstance(record.errors[0], Unavailable)
    assert record.errors[0].retry_after_s == 0.1
    cluster.hub.cancel(transfer)
    await cluster.settled()


async def test_handoff_to_older_incarnation_fails_at_once(cluster: Cluster) -> None:
    stale = replace(cluster.prefill.route(1), incarnation=Incarnation(9))
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 30), stale)
    record = await cluster.decode.until(transfer, lambda r: r.errors)
    assert "restarted" in record.errors[0].message
    assert not cluster.prefill.owner.jobs
    cluster.hub.reroute(transfer, cluster.prefill.route(2))
    await cluster.decode.until(transfer, lambda r: r.committed)
    await cluster.settled()


async def test_handoff_of_other_tokens_is_not_committed(cluster: Cluster) -> None:
    computed = BlockHash(b"1" * 16)
    finished = cluster.prefill.hub.finished
    cluster.prefill.hub.finished = lambda *args, **kwargs: finished(*args, **kwargs, tail_hash=computed)
    job = make_job("a", 30, tail_hash=BlockHash(b"2" * 16))
    transfer = begin(cluster.hub, cluster.decode, job, cluster.prefill.route(1))
    record = await cluster.decode.until(transfer, lambda r: r.errors)
    assert "other tokens" in record.errors[0].message
    cluster.hub.cancel(transfer)
    cluster.decode.end(transfer)
    await cluster.settled()


async def test_handoff_hub_misuse_is_refused(cluster: Cluster) -> None:
    cluster.prefill.owner.gate.clear()
    transfer = begin(cluster.hub, cluster.decode, make_job("a", 30), cluster.prefill.route(1))
    with pytest.raises(TransferError):
        cluster.hub.start(make_job("a", 30), cluster.prefill.route(1))
    with pytest.raises(TransferError):
        cluster.hub.reroute(transfer, cluster.prefill.route(2))
    with pytest.raises(TransferError):
        cluster.hub.reroute("unknown", cluster.prefill.route(2))
    cluster.hub.cancel("unknown")
    cluster.prefill.owner.gate.set()
    await cluster.decode.until(transfer, lambda r: r.committed)
    await cluster.settled()


async def test_many_handoffs_with_cancels_leave_nothing(cluster: Cluster) -> None:
    rng = random.Random(3)
    limit = asyncio.Semaphore(4)

    async def one(index: int) -> None:
        async with limit:
            job = make_job(f"m{index}", rng.randrange(1, 41))
            transfer = begin(cluster.hub, cluster.decode, job, cluster.prefill.route(1))
            if rng.random() < 0.3:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0.001)
                cluster.hub.cancel(transfer)
                cluster.decode.end(transfer)
            else:
                record = await cluster.decode.until(transfer, lambda r: r.committed or r.errors)
                assert not record.errors

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(i) for i in range(200)))
    await cluster.settled()
    assert cluster.hub.stats.committed >= 120
    assert cluster.prefill.hub.stats.nacks == 0
    assert SETTINGS.max_transfers > 200
