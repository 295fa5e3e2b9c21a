"""Hubs never block their process from ending: after a bug at once, else after a lease at most."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kv_transfer.protocol import wire
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import HandoffEnvelope, PrefillJob
from kv_transfer.session.peer import Route
from kv_transfer.transports.in_process import MemoryFabric
from tandem.errors import InvariantError
from tandem.rpc.cluster_grpc import SERVER_OPTIONS
from tandem.v1.handoff_pb2_grpc import HandoffServicer, add_HandoffServicer_to_server
from tandem.values.ids import Incarnation, TransferId, WorkerId
from tests.integration.handoff.test_failures import decoding, prefilling, wait_for
from tests.support.kv_transfer.handoff_fakes import SETTINGS, WAIT_S, begin, make_job

IMPATIENT = replace(SETTINGS, lease_s=0.3, sweep_s=0.02)


class Engine:
    """Answers no job, and raises for the one named "bug"."""

    def __init__(self) -> None:
        self.submitted: list[str] = []

    async def submit(self, job: PrefillJob) -> None:
        self.submitted.append(job.transfer_id)
        if job.transfer_id == "bug":
            raise InvariantError("broken")
        await asyncio.Event().wait()


async def test_prefill_worker_with_a_bug_ends_despite_pending_engine_work() -> None:
    fabric, engine = MemoryFabric(), Engine()
    async with decoding("memory", fabric=fabric) as (hub, owner):
        with pytest.RaisesGroup(InvariantError):
            async with asyncio.timeout(WAIT_S), prefilling("memory", fabric=fabric) as worker:
                worker.owner.submit = engine.submit
                begin(hub, owner, make_job("a", 40), worker.route(1))
                await wait_for(lambda: engine.submitted)
                begin(hub, owner, make_job("bug", 40), worker.route(1))
                await asyncio.Event().wait()
        assert worker.hub.num_transfers == 1, "all but the broken one have ended"


async def test_prefill_worker_leaves_despite_unresponsive_engine() -> None:
    fabric, engine = MemoryFabric(), Engine()
    async with decoding("memory", fabric=fabric) as (hub, owner):
        async with asyncio.timeout(WAIT_S), prefilling("memory", fabric=fabric, settings=IMPATIENT) as worker:
            worker.owner.submit = engine.submit
            begin(hub, owner, make_job("a", 40), worker.route(1))
            await wait_for(lambda: engine.submitted)
        assert worker.hub.num_transfers == 0


async def test_decode_worker_bug_ends_its_process() -> None:
    fabric = MemoryFabric()

    async def bind(transfer_id: TransferId, _num_blocks: int) -> BlocksBound:
        if transfer_id == "bug":
            raise InvariantError("broken")
        await asyncio.Event().wait()
        return BlocksBound(blocks=())

    async with prefilling("memory", fabric=fabric) as worker:
        with pytest.RaisesGroup(InvariantError):
            async with asyncio.timeout(WAIT_S), decoding("memory", fabric=fabric) as (hub, owner):
                owner.bind = bind
                for name in ("a", "bug"):
                    begin(hub, owner, make_job(name, 40), worker.route(1))
                await asyncio.Event().wait()


class Frozen(HandoffServicer):
    """Says hello, and reads no more."""

    async def Connect(self, _requests: object, stream: Any) -> None:
        hello = wire.decode(await stream.read()).body
        chosen = replace(hello, transports=hello.transports[:1], wire_dtype=hello.layout.dtype)
        await stream.write(
            wire.encode(HandoffEnvelope(incarnation=Incarnation(1), addressee=Incarnation(22), key=None, body=chosen))
        )
        await asyncio.Event().wait()


async def test_decode_worker_leaves_despite_peer_not_reading() -> None:
    fabric = MemoryFabric()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_HandoffServicer_to_server(Frozen(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with asyncio.timeout(WAIT_S), decoding("memory", replace(IMPATIENT, lease_s=1.0), fabric) as (hub, owner):
        route = Route(worker_id=WorkerId("p"), incarnation=Incarnation(1), address=address, attempt=1)
        begin(hub, owner, make_job("first", 8), route)
        await wait_for(lambda: hub._links[address].peer is not None)
        large = make_job("large", 8, token_ids=(1 << 14,) * 100_000)
        for index in range(20):  # more than the stream's window takes
            begin(hub, owner, replace(large, transfer_id=TransferId(f"t{index}")), route)
        await asyncio.sleep(0)
    await server.stop(None)
