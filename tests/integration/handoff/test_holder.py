"""The other holder of a prompt's prefix is sent with every new route."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from decode_worker.orders import holder_of, route_from_pb
from kv_transfer.transports.in_process import MemoryFabric
from router.fleet.session_wire import reroute_to_pb
from router.types.session_events import PrefillRoute
from router.types.worker_view import WorkerKey
from tandem.values.ids import Incarnation, RequestId, TransferId, WorkerId
from tandem.values.prefix_holder import PrefixHolder
from tests.integration.handoff.test_failures import all_free, decoding, prefilling, wait_for
from tests.support.kv_transfer.handoff_fakes import begin, make_job

FIRST, SECOND = (
    PrefixHolder(worker_id=WorkerId(name), incarnation=Incarnation(7), address=f"{name}:1", num_tokens=32)
    for name in ("d1", "d2")
)


@asynccontextmanager
async def failed_first_attempt() -> AsyncIterator[tuple[Any, Any, Any, TransferId]]:
    """A hand-off whose first attempt, with the first holder, lost its link; leaves nothing behind."""
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        worker.owner.gate.clear()
        transfer = begin(hub, owner, make_job("a", 30, holder=FIRST), worker.route(1))
        await wait_for(lambda: worker.owner.jobs)
        for link in list(worker.hub._links):
            link.close()
        await owner.until(transfer, lambda r: r.errors)
        worker.owner.gate.set()
        yield hub, owner, worker, transfer
        await hub.drain()
        await wait_for(lambda: all_free(worker.owner.pool))


async def test_reroute_to_second_prefill_worker_names_second_holder() -> None:
    async with failed_first_attempt() as (hub, owner, worker, transfer):
        # As the router says it, and as the decode worker reads it.
        route = PrefillRoute(
            worker=WorkerKey(WorkerId("p"), worker.incarnation),
            address=worker.address,
            transfer_id=transfer,
            attempt=2,
            holder=SECOND,
        )
        message = reroute_to_pb(RequestId("r"), 1, route).reroute
        assert holder_of(message) == SECOND
        hub.reroute(transfer, route_from_pb(message.prefill)[1], holder_of(message))
        await owner.until(transfer, lambda r: r.committed)
        assert [job.holder for job in worker.owner.jobs] == [FIRST, SECOND]


async def test_reroute_without_holder_forgets_previous_one() -> None:
    async with failed_first_attempt() as (hub, owner, worker, transfer):
        message = reroute_to_pb(RequestId("r"), 1, None).reroute
        assert holder_of(message) is None
        hub.reroute(transfer, worker.route(2), holder_of(message))
        await owner.until(transfer, lambda r: r.committed)
        assert [job.holder for job in worker.owner.jobs] == [FIRST, None]
        assert TransferId("a") == transfer
