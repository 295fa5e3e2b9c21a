"""Pin renewals that a worker does not accept stay bounded, whatever is ordered meanwhile."""

import asyncio
from typing import Any

from router.fleet.session_carriers import GrpcCarrier
from router.fleet.session_wire import hello_from_pb
from router.fleet.worker_session import PendingPinOrders, SessionSettings, WorkerSession
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, Incarnation
from tandem.values.prefix_pin import PinKey, PinOrder
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import WatchedRegistry
from worker.session_port import orders_of


def _key(name: object) -> PinKey:
    return PinKey("t", str(name))


def _order(name: object, ttl_s: float) -> PinOrder:
    return PinOrder(key=_key(name), last_block=BlockHash(b"block"), ttl_s=ttl_s)


def test_pending_pin_orders_keep_newest_per_pin() -> None:
    pins = PendingPinOrders[str](most=10)
    for order in ("made", "renewed", "renewed again"):
        pins.add(_key("a"), order)
        pins.add(_key("b"), order)
    pins.add(_key("a"), "ended")
    assert len(pins) == 2
    assert [pins.pop_first(), pins.pop_first()] == ["renewed again", "ended"]
    assert not pins


def test_pending_pin_orders_drop_oldest_beyond_bound() -> None:
    pins = PendingPinOrders[int](most=3)
    for number in range(5):
        pins.add(_key(number), number)
    pins.add(_key(2), 22)
    assert ([pins.pop_first(), pins.pop_first()], len(pins)) == ([3, 4], 1)
    pins.clear()
    assert not pins


class _Stuck:
    """A call to a worker that reads nothing until the test allows it; it never replies."""

    def __init__(self) -> None:
        self.written: list[pb.RouterMessage] = []
        self.is_called, self.may_go, self.has_unpinned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def write(self, message: pb.RouterMessage) -> None:
        self.is_called.set()
        await self.may_go.wait()
        self.written += orders_of(message)
        if self.written[-1].HasField("unpin"):
            self.has_unpinned.set()

    async def read(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        """Do nothing: the call is never answered."""


async def test_pending_pin_orders_for_stuck_worker_are_bounded_and_newest() -> None:
    call, settings = _Stuck(), SessionSettings(metadata=(), incarnation=Incarnation(5), silence_s=3600.0)
    info = hello_from_pb(pb.WorkerMessage(hello=FakeWorker("d0").hello))
    session = WorkerSession(GrpcCarrier(call), info, settings)
    conversing = asyncio.create_task(session.converse(WatchedRegistry()))
    await call.is_called.wait()
    for number in range(3_000):
        session.pin(_order(number % 100, ttl_s=number))
    session.unpin(_key(7))
    call.may_go.set()
    await call.has_unpinned.wait()
    conversing.cancel()
    await asyncio.gather(conversing, return_exceptions=True)
    orders, kinds = call.written[1:], [order.WhichOneof("kind") for order in call.written]
    assert kinds == ["end_earlier_sessions", *["pin"] * 99, "unpin"]
    assert sorted(order.pin.ttl_s for order in orders[:-1]) == [2900 + n for n in range(100) if n != 7]
    session.pin(_order("late", ttl_s=1.0))
    assert not session._pins
