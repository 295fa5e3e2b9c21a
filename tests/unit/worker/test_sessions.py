"""A worker's side of its sessions: order, bounds and ends."""

import asyncio
from typing import Any

import grpc
import pytest

from tandem.protocol.session_versions import SPOKEN
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from worker import sessions
from worker.session_port import MAX_QUEUED_MESSAGES, PIECE_EVENTS, SessionPort
from worker.sessions import WorkerSessions


class Handler:
    def __init__(self) -> None:
        self.gone: list[SessionPort] = []
        self.port: asyncio.Future[SessionPort] = asyncio.get_running_loop().create_future()

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(worker_id="w")

    def opened(self, port: SessionPort) -> None:
        self.port.set_result(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        raise AssertionError("nothing was ordered")

    def closed(self, port: SessionPort) -> None:
        self.gone.append(port)

    async def load(self) -> pb.LoadSnapshot:
        return pb.LoadSnapshot()


class StuckRouter:
    """A router that says hello and then reads nothing: flow control holds every write after the first."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._hello = [pb.RouterMessage(hello=pb.RouterHello(protocol_version=SPOKEN.newest, incarnation=7))]

    async def read(self) -> Any:
        if self._hello:
            return self._hello.pop()
        return await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        if self.written:
            await asyncio.Event().wait()
        self.written.append(message)


async def test_session_of_router_that_does_not_read_ends() -> None:
    handler, router = Handler(), StuckRouter()
    session = asyncio.create_task(WorkerSessions(handler).Session(None, router))
    port = await handler.port
    for _ in range(MAX_QUEUED_MESSAGES + 2):
        port.send(pb.WorkerMessage(load=pb.LoadSnapshot()))
    async with asyncio.timeout(10):
        await session
    assert handler.gone == [port]
    assert port.closed


class ReturningRouter(StuckRouter):
    """The same or another router in a new session, which declares its earlier ones over."""

    def __init__(self, incarnation: int) -> None:
        super().__init__()
        hello = pb.RouterHello(protocol_version=SPOKEN.newest, incarnation=incarnation)
        self._hello = [pb.RouterMessage(end_earlier_sessions=pb.EndEarlierSessions()), pb.RouterMessage(hello=hello)]


@pytest.mark.parametrize(("incarnation", "ends"), [(7, True), (8, False)])
async def test_session_new_one_ends_routers_former_one(incarnation: int, ends: bool) -> None:
    handler = Handler()
    sessions = WorkerSessions(handler)
    former = asyncio.create_task(sessions.Session(None, StuckRouter()))
    port = await handler.port
    handler.port = asyncio.get_running_loop().create_future()
    present = asyncio.create_task(sessions.Session(None, router := ReturningRouter(incarnation)))
    again = await handler.port
    async with asyncio.timeout(10):
        if ends:
            await former
        while router._hello:  # noqa: ASYNC110 - a router's side has no event
            await asyncio.sleep(0)
    assert (port.closed, again.closed) == (ends, False)
    assert handler.gone == ([port] if ends else [])
    for live in sessions.ports:
        live.close()
    async with asyncio.timeout(10):
        await asyncio.gather(former, present)


class BrokenRouter(StuckRouter):
    """A router that cannot be written to, or sends an invalid order."""

    def __init__(self, *, reads: bool, fault: Exception | None = None) -> None:
        super().__init__()
        self._scoring = reads
        self._fault = fault or OSError("nobody reads")

    async def read(self) -> Any:
        if self._hello or self._scoring:
            return await super().read()
        return pb.RouterMessage()

    async def write(self, message: Any) -> None:
        if self._scoring:
            raise self._fault


@pytest.mark.parametrize(("reads", "fault"), [(True, "nobody reads"), (False, "nothing was ordered")])
async def test_session_broken_reports_reason(reads: bool, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler()
    await WorkerSessions(handler).Session(None, BrokenRouter(reads=reads))
    assert [port.closed for port in handler.gone] == [True]
    (record,) = [record for record in caplog.records if record.name == "worker.sessions"]
    assert record.exc_info is not None
    assert fault in str(record.exc_info[1])


async def test_session_router_leaving_mid_message_ends_cleanly(caplog: pytest.LogCaptureFixture) -> None:
    handler, router = Handler(), BrokenRouter(reads=True, fault=grpc.aio.InternalError("execute_batch"))
    await WorkerSessions(handler).Session(None, router)
    assert [port.closed for port in handler.gone] == [True]
    assert caplog.records == []


def stored(*names: bytes) -> list[pb.KVEvent]:
    return [pb.KVEvent(block_hash=name, stored=True) for name in names]


async def sent(port: SessionPort) -> list[pb.KVEvents]:
    port.finish()
    found = []
    while (message := await port.next()) is not None:
        found.append(message.kv_events)
    return found


async def test_session_events_covered_by_snapshot_are_not_sent_again() -> None:
    port = SessionPort(Incarnation(1))
    assert port.send_events(0, stored(b"early"))  # before the snapshot: it will hold them
    port.send_snapshot(5, stored(b"a", b"b"))
    assert port.send_events(3, stored(b"old", b"old too", b"new"))
    assert port.send_events(6, stored(b"newer"))
    snapshot, first, second = await sent(port)
    assert (snapshot.cleared, snapshot.first_sequence, len(snapshot.events)) == (True, 5, 2)
    assert (first.first_sequence, [e.block_hash for e in first.events]) == (5, [b"new"])
    assert (second.first_sequence, [e.block_hash for e in second.events]) == (6, [b"newer"])


@pytest.mark.parametrize(
    ("next_event", "num_stored", "num_first"),
    [(0, 0, 0), (3, 3, 3), (9_000, 4_096, 4_096), (9_000, 9_000, 4_096), (5_000, 20_000, 15_000), (0, 9_000, 9_000)],
)
async def test_large_snapshot_is_sent_in_pieces(next_event: int, num_stored: int, num_first: int) -> None:
    """One message of it all would halt a router's streams, and above 32 MiB end its session."""
    names = [number.to_bytes(16, "big") for number in range(num_stored)]
    port = SessionPort(Incarnation(1))
    port.send_snapshot(next_event, stored(*names))
    assert port.send_events(next_event, stored(b"later"))
    first, *changes = await sent(port)
    assert (first.cleared, len(first.events)) == (True, num_first)
    due, found = first.first_sequence, [event.block_hash for event in first.events]
    for piece in changes:
        assert (piece.cleared, piece.first_sequence) == (False, due)
        assert len(piece.events) <= PIECE_EVENTS
        due += len(piece.events)
        found += [event.block_hash for event in piece.events]
    assert (due, found) == (next_event + 1, [*names, b"later"])


async def test_session_gap_is_detected() -> None:
    port = SessionPort(Incarnation(1))
    port.send_snapshot(5, [])
    assert not port.send_events(7, stored(b"a"))


@pytest.mark.parametrize("end", ["finish", "close"])
async def test_session_queue_is_flushed_on_finish_not_on_close(end: str) -> None:
    port = SessionPort(Incarnation(1))
    port.send(pb.WorkerMessage(draining=pb.Draining(reason="x")))
    getattr(port, end)()
    assert (await port.next() is not None) == (end == "finish")
    port.send(pb.WorkerMessage(draining=pb.Draining(reason="late")))
    assert await port.next() is None


class FailingPublisher:
    """A publisher that must not be called."""

    def send_snapshot(self, next_event: int, stored: Any) -> None:
        raise AssertionError("of the sessions' making")

    send_events = send_snapshot

    def report(self) -> pb.RedisPublisherReport:
        return pb.RedisPublisherReport(up=True, entries=3)


@pytest.mark.parametrize(
    ("asked", "agreed"), [(0.0, 0.25), (0.3, 0.3), (0.01, 0.25), (3600.0, 0.5), (-1.0, 0.25), (float("nan"), 0.25)]
)
def test_session_port_bounds_period_of_load_reports(asked: float, agreed: float) -> None:
    assert SessionPort(Incarnation(1), load_period_s=asked).load_period_s == agreed


class CountedLoads(Handler):
    """Counts the load reports that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loads = 0
        self.asked = asyncio.Event()

    def opened(self, port: SessionPort) -> None: ...

    async def load(self) -> pb.LoadSnapshot:
        self.num_loads += 1
        self.asked.set()
        return pb.LoadSnapshot()


async def test_load_reports_come_as_often_as_the_router_that_wants_most_and_at_once_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only a new session can end the first wait within this test.
    monkeypatch.setattr(sessions, "LOAD_PERIOD_S", 3600.0)
    handler = CountedLoads()
    served = WorkerSessions(handler)
    reporting = asyncio.create_task(served.send_loads())
    async with asyncio.timeout(10.0):
        await handler.asked.wait()
        for number, period_s in enumerate((3600.0, 0.001)):
            handler.asked.clear()
            port = SessionPort(Incarnation(number))
            port.load_period_s = period_s
            served._open(port)
            await handler.asked.wait()
        while handler.num_loads < 6:
            handler.asked.clear()
            await handler.asked.wait()
    reporting.cancel()


class Router(StuckRouter):
    """A router that reads everything at once."""

    def __init__(self, *, reads_redis: bool) -> None:
        self.written = []
        self._hello = [
            pb.RouterMessage(
                hello=pb.RouterHello(protocol_version=SPOKEN.newest, incarnation=7, reads_redis=reads_redis)
            )
        ]

    async def write(self, message: Any) -> None:
        self.written.append(message)


@pytest.mark.parametrize(
    ("publishes", "reads", "gets_events"), [(True, True, False), (True, False, True), (False, True, True)]
)
async def test_session_router_that_reads_redis_gets_no_kv_events(
    publishes: bool, reads: bool, gets_events: bool
) -> None:
    handler, router, publisher = Handler(), Router(reads_redis=reads), FailingPublisher()
    sessions = WorkerSessions(handler, publisher if publishes else None)
    session = asyncio.create_task(sessions.Session(None, router))
    port = await handler.port
    assert port.wants_events == gets_events
    assert sessions.event_sinks == [*([port] if gets_events else []), *([publisher] if publishes else [])]
    telling = asyncio.create_task(sessions.send_loads())
    while len(router.written) < 2:  # noqa: ASYNC110 - a router's side has no event
        await asyncio.sleep(0)
    telling.cancel()
    load = router.written[1].load
    assert load.report_number == 1
    assert load.HasField("redis_publishing") == publishes
    assert load.redis_publishing.entries == 3 * publishes
    port.close()
    await session
