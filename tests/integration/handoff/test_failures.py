"""Failing hand-offs: killed, frozen, corrupted, mismatched and hostile peers."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.session.peer import Route
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.interface import KVSender, PeerWriter, WriteOrder, WriteResult
from tandem.errors import TransferError
from tandem.values.ids import Incarnation, WorkerId
from tests.support.kv_transfer.handoff_fakes import (
    BLOCK,
    LAYOUT,
    SETTINGS,
    WAIT_S,
    DecodeOwner,
    Pool,
    Prefill,
    begin,
    decode_worker,
    make_job,
    prefill_worker,
)

IMPATIENT = replace(SETTINGS, lease_s=0.4, drain_s=0.1)


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def all_free(pool: Pool) -> bool:
    return len(pool.free) == pool.num_blocks


@asynccontextmanager
async def decoding(
    choice: str, settings: TransferSettings = SETTINGS, fabric: MemoryFabric | None = None
) -> AsyncIterator[tuple[ReceiverHub, DecodeOwner]]:
    async with decode_worker(
        lambda region: open_receivers(region, choice=choice, fabric=fabric), pool=Pool(48), settings=settings
    ) as (hub, owner):
        yield hub, owner


def prefilling(choice: str, **options: object):
    fabric = options.pop("fabric", None)
    return prefill_worker(lambda region: open_senders(region, choice=choice, fabric=fabric), pool=Pool(64), **options)


class PrefillProcess:
    """A prefill worker that can be killed."""

    def __init__(self, transport: str, incarnation: int, gate_after_tokens: int) -> None:
        args = [transport, str(incarnation), str(gate_after_tokens)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_transfer.handoff_prefill_main", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"
        self.incarnation = Incarnation(incarnation)

    def route(self, attempt: int) -> Route:
        return Route(worker_id=WorkerId("p"), incarnation=self.incarnation, address=self.address, attempt=attempt)


@contextmanager
def prefill_process(transport: str, *, incarnation: int = 5, gate_after_tokens: int = 0) -> Iterator[PrefillProcess]:
    worker = PrefillProcess(transport, incarnation, gate_after_tokens)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.communicate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 6),
        ("dtype", "bfloat16"),
        ("num_layers", 4),
        ("num_kv_heads", 1),
        ("head_dim", 4),
        ("model_fingerprint", "other"),
        ("tp_size", 3),
    ],
)
async def test_handoff_between_different_layouts_is_refused(field: str, value: object) -> None:
    fabric = MemoryFabric()
    other = replace(LAYOUT, **{field: value})
    async with (
        decoding("memory", fabric=fabric) as (hub, owner),
        prefilling("memory", fabric=fabric, layout=other) as worker,
    ):
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        record = await owner.until(transfer, lambda r: r.errors)
        assert f"refused: {field}: " in record.errors[0].message
        assert not worker.owner.jobs
        hub.cancel(transfer)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_handoff_killed_prefill_worker_costs_only_missing_blocks(transport: str) -> None:
    async with decoding(transport) as (hub, owner), prefilling(transport) as spare:
        with prefill_process(transport, gate_after_tokens=24) as victim:
            transfer = begin(hub, owner, make_job("a", 45), victim.route(1))
            await wait_for(lambda: hub.stats.num_bytes >= 6 * LAYOUT.block_bytes)
            victim.process.kill()
            record = await owner.until(transfer, lambda r: r.errors)
        assert len(record.landed) == 6
        await wait_for(lambda: len(owner.pool.free) == 48 - 6)
        assert hub.stats.quarantined_blocks == 0, "the death is proven by the end of its socket, or needs no proof"
        hub.reroute(transfer, spare.route(2))
        await owner.until(transfer, lambda r: r.committed)
        [job] = spare.owner.jobs
        assert job.held_tokens == 6 * BLOCK
        assert not job.resume
        await hub.drain()
        assert all_free(owner.pool)


async def test_handoff_known_first_token_is_not_sampled_again() -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        owner.bind_gate.clear()
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        await owner.until(transfer, lambda r: r.tokens)
        owner.bind_gate.set()
        for link in list(worker.hub._links):
            link.close()
        await owner.until(transfer, lambda r: r.errors)
        hub.reroute(transfer, worker.route(2))
        record = await owner.until(transfer, lambda r: r.committed)
        assert [job.resume for job in worker.owner.jobs] == [False, True]
        assert len(record.tokens) == 1
        await hub.drain()
        await wait_for(lambda: all_free(worker.owner.pool))
        assert all_free(owner.pool)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_handoff_with_frozen_writer_reuses_no_unproven_block(transport: str) -> None:
    async with decoding(transport, IMPATIENT) as (hub, owner), prefilling(transport) as spare:
        with prefill_process(transport, gate_after_tokens=24) as victim:
            transfer = begin(hub, owner, make_job("a", 45), victim.route(1))
            await wait_for(lambda: hub.stats.num_bytes >= 6 * LAYOUT.block_bytes)
            victim.process.send_signal(signal.SIGSTOP)
            record = await owner.until(transfer, lambda r: r.errors)
            assert hub.stats.expired == 1
            suspects = set(record.bound[6:])
            hub.reroute(transfer, spare.route(2))
            await owner.until(transfer, lambda r: r.committed)
            if transport == "tcp":
                assert not owner.quarantined, "revocation by the receiver is proof enough"
            else:
                await wait_for(lambda: owner.quarantined)
                assert owner.quarantined == suspects
                assert hub.stats.quarantined_blocks == len(suspects)
                assert not suspects & set(owner.pool.free)
                assert not suspects & set(record.committed.blocks)
            victim.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(WAIT_S):
                await hub.drain()
        assert all_free(owner.pool)
        assert hub.stats.quarantined_blocks == 0


async def test_handoff_without_common_transport_is_refused() -> None:
    async with decoding("tcp") as (hub, owner), prefilling("shm") as worker:
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        record = await owner.until(transfer, lambda r: r.errors)
        assert "no KV transport in common" in record.errors[0].message
        hub.cancel(transfer)


async def test_handoff_uses_best_common_transport() -> None:
    fabric = MemoryFabric()
    async with decoding("auto") as (hub, owner), prefilling("auto", fabric=fabric) as worker:
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        await owner.until(transfer, lambda r: r.committed)
        assert [link.transport for link in hub._links.values()] == ["shm"]
        await hub.drain()


class Faulty:
    """A sending end whose bytes are corrupted in transit, at the rate `damage`."""

    def __init__(self, inner: KVSender, damage: Callable[[], bool]) -> None:
        self.inner, self.damage = inner, damage
        self.name = inner.name
        self.one_sided = inner.one_sided

    def reaches(self, offer: TransportOffer) -> bool:
        return self.inner.reaches(offer)

    def connect(self, offer: TransportOffer, pairing: Pairing) -> "FaultyWriter":
        return FaultyWriter(self, self.inner.connect(offer, pairing))


class FaultyWriter:
    def __init__(self, sender: Faulty, inner: PeerWriter) -> None:
        self.sender, self.inner = sender, inner

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def cancel(self, key: TransferKey) -> bool:
        return self.inner.cancel(key)

    def close(self) -> None:
        self.inner.close()

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        outer: Future[WriteResult] = Future()

        def done(inner: "Future[WriteResult]") -> None:
            if inner.exception() is not None:
                outer.set_exception(inner.exception())
                return
            result = inner.result()
            if self.sender.damage():
                # A byte flipped before it landed: what was checksummed there is not what left.
                result = replace(result, checksum=result.checksum ^ 0x10)
            outer.set_result(result)

        self.inner.write(order).add_done_callback(done)
        return outer


@asynccontextmanager
async def faulty_pair(damage: Callable[[], bool]) -> AsyncIterator[tuple[ReceiverHub, DecodeOwner, Prefill]]:
    async with AsyncExitStack() as stack:
        hub, owner = await stack.enter_async_context(decoding("tcp"))
        worker = await stack.enter_async_context(
            prefill_worker(
                lambda region: tuple(Faulty(s, damage) for s in open_senders(region, choice="tcp")),
                pool=Pool(64),
            )
        )
        yield hub, owner, worker


async def test_handoff_damaged_chunks_are_written_again() -> None:
    rng = random.Random(4)
    async with faulty_pair(lambda: rng.random() < 0.3) as (hub, owner, worker):
        for index in range(20):
            transfer = begin(hub, owner, make_job(f"f{index}", 40), worker.route(1))
            record = await owner.until(transfer, lambda r: r.committed or r.errors)
            if record.errors:
                assert "damaged" in record.errors[0].message
                hub.cancel(transfer)
                owner.end(transfer)
        assert hub.stats.nacks > 0
        assert hub.stats.committed > 10
        await hub.drain()
        await wait_for(lambda: all_free(worker.owner.pool))
        assert all_free(owner.pool)


async def test_handoff_chunk_always_damaged_fails_the_attempt() -> None:
    async with faulty_pair(lambda: True) as (hub, owner, worker):
        transfer = begin(hub, owner, make_job("a", 40), worker.route(1))
        record = await owner.until(transfer, lambda r: r.errors)
        assert "damaged 4 times" in record.errors[0].message
        assert record.landed == []
        hub.cancel(transfer)
        await hub.drain()
        await wait_for(lambda: all_free(worker.owner.pool))
        assert all_free(owner.pool)


async def test_failed_handoff_without_reroute_expires() -> None:
    async with decoding("tcp", replace(SETTINGS, reroute_s=0.1)) as (hub, owner):
        nobody = Route(worker_id=WorkerId("p"), incarnation=Incarnation(1), address="127.0.0.1:1", attempt=1)
        transfer = begin(hub, owner, make_job("a", 40), nobody)
        record = await owner.until(transfer, lambda r: r.errors)
        assert "127.0.0.1:1" in record.errors[0].message
        await owner.until(transfer, lambda r: r.over)
        assert hub.num_transfers == 0


async def test_draining_prefill_worker_finishes_current_handoffs() -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        worker.owner.gate.clear()
        first = begin(hub, owner, make_job("a", 40), worker.route(1))
        await wait_for(lambda: worker.owner.jobs)
        drained = asyncio.create_task(worker.hub.drain())
        await asyncio.sleep(0)
        second = begin(hub, owner, make_job("b", 40), worker.route(1))
        record = await owner.until(second, lambda r: r.errors)
        assert "draining" in record.errors[0].message
        hub.cancel(second)
        worker.owner.gate.set()
        await owner.until(first, lambda r: r.committed)
        await drained


async def test_handoff_newer_attempt_supersedes_older_on_same_worker() -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        worker.owner.gate.clear()
        transfer = begin(hub, owner, make_job("a", 40), worker.route(1))
        await wait_for(lambda: worker.owner.jobs and worker.hub._attempts[transfer].machine.reserve)
        worker.hub.failed(transfer, TransferError("engine gave up"))
        record = await owner.until(transfer, lambda r: r.errors)
        assert record.errors[0].message == "prefill worker: engine gave up"
        worker.owner.gate.set()
        hub.reroute(transfer, worker.route(2))
        await owner.until(transfer, lambda r: r.committed)
        await hub.drain()
        assert all_free(owner.pool)


async def test_decode_worker_leaving_during_handoffs_frees_everything() -> None:
    fabric = MemoryFabric()
    async with prefilling("memory", fabric=fabric) as worker:
        worker.owner.gate.clear()
        worker.owner.gate_after_tokens = 16
        async with decoding("memory", fabric=fabric) as (hub, owner):
            for name in "abc":
                begin(hub, owner, make_job(name, 40), worker.route(1))
            await wait_for(lambda: len(owner.pool.free) == 48 - 30)
        assert all_free(owner.pool)
        await wait_for(lambda: all_free(worker.owner.pool))
