"""Cancels and clean-up take effect without timers or further requests (docs/extend/incidents.md)."""

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from kv_transfer.transports.catalogue import open_receivers
from kv_transfer.transports.in_process import MemoryFabric
from tandem.errors import Unavailable
from tandem.v1.handoff_pb2_grpc import HandoffStub
from tests.integration.handoff.test_failures import all_free, decoding, prefilling, wait_for
from tests.integration.handoff.test_hostile_peer import hello, prefill_message
from tests.support.kv_transfer.handoff_fakes import BLOCK, SETTINGS, WAIT_S, Pool, begin, make_job

NEVER_S = 3600.0
WITHOUT_TIMERS = replace(
    SETTINGS, lease_s=NEVER_S, stall_s=NEVER_S, queue_s=NEVER_S, drain_s=NEVER_S, reroute_s=NEVER_S, sweep_s=NEVER_S
)
"""No lease ends and no reaper looks while the test runs: what happens, happens because of a message."""
IMPATIENT = replace(SETTINGS, lease_s=0.4, drain_s=0.1, reroute_s=0.2)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("gate_after", [0, 16])
async def test_handoff_cancel_stops_prefill_without_timers(transport: str, gate_after: int) -> None:
    """The prompt would be computed forever. Only the cancel can end it, and it frees both pools."""
    fabric = MemoryFabric()
    async with (
        decoding(transport, WITHOUT_TIMERS, fabric) as (hub, owner),
        prefilling(transport, settings=WITHOUT_TIMERS, fabric=fabric) as worker,
    ):
        worker.owner.gate.clear()
        worker.owner.gate_after_tokens = gate_after
        transfer = begin(hub, owner, make_job("a", 40), worker.route(1))
        await wait_for(lambda: len(owner.records[transfer].bound) == 10)
        hub.cancel(transfer)
        owner.end(transfer)
        async with asyncio.timeout(WAIT_S):
            await worker.owner.aborted[transfer].wait()
            await hub.drain()
        await wait_for(lambda: all_free(worker.owner.pool) and not worker.hub.num_transfers)
        assert all_free(owner.pool)
        assert not owner.quarantined


async def test_pool_full_of_holds_is_cleaned_up_without_requests() -> None:
    """One silent decode worker holds all of a prefill worker's blocks; no new request is needed to free them."""
    fabric = MemoryFabric()
    [receiver] = open_receivers(Pool(48).region, choice="memory", fabric=fabric)
    async with (
        prefilling("memory", fabric=fabric, settings=IMPATIENT) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        stream = HandoffStub(channel).Connect()
        await stream.write(hello(receiver.offer()))
        await stream.read()
        pool = worker.owner.pool
        await stream.write(prefill_message("x", pool.num_blocks * BLOCK))
        await wait_for(lambda: not pool.free)
        await wait_for(lambda: all_free(pool))
        stream.cancel()
    receiver.close()


async def test_pool_full_of_destinations_is_cleaned_up_without_requests() -> None:
    """Its prefill worker writes nothing and renews nothing, and the router names no other."""
    fabric = MemoryFabric()
    async with (
        decoding("memory", IMPATIENT, fabric) as (hub, owner),
        prefilling("memory", fabric=fabric, settings=SETTINGS) as worker,
    ):
        worker.hub._reaper.stop()  # which is what renews leases
        worker.owner.gate.clear()
        transfer = begin(hub, owner, make_job("a", owner.pool.num_blocks * BLOCK), worker.route(1))
        await wait_for(lambda: not owner.pool.free)
        with pytest.raises(Unavailable):
            owner.pool.allocate(1)
        await wait_for(lambda: all_free(owner.pool))
        assert owner.records[transfer].errors
        await hub.drain()
