"""Both ends of a session that goes on at the direct port: a real worker's sessions, a real router's session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from router.fleet.connections import WorkerFleet
from router.fleet.session_carriers import Connect, DirectCarrier, GrpcCarrier
from router.fleet.worker_session import WorkerSession
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey
from tandem.backoff import Backoff
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels, listen, make_server
from tandem.rpc.hosts import hold
from tandem.rpc.mutual_tls import MEMBER_NAME
from tandem.rpc.worker_directory import ChangingDirectory, stated_addresses
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import add_WorkerServicer_to_server
from tests.support.certificates import Authority
from tests.support.fake_worker import SECRET, FakeWorker
from tests.support.router.cluster import WatchedRegistry, session_settings
from tests.unit.tandem.rpc.test_framed_connection import LOOPS, run
from worker.direct_port import DirectPort
from worker.session_port import MAX_QUEUED_MESSAGES, SessionPort
from worker.sessions import WorkerSessions

CHANNELS = ClusterChannels(None)


class Handler:
    """A worker that keeps what it is told."""

    def __init__(self) -> None:
        self.ports: asyncio.Queue[SessionPort] = asyncio.Queue()
        self.orders: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self.gone: asyncio.Queue[SessionPort] = asyncio.Queue()
        self.fails_at = ""

    def hello(self) -> pb.WorkerHello:
        hello = pb.WorkerHello()
        hello.CopyFrom(FakeWorker("d0").hello)
        return hello

    def opened(self, port: SessionPort) -> None:
        port.send_snapshot(0, [])
        self.ports.put_nowait(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        if message.WhichOneof("kind") == self.fails_at:
            raise ValueError("this order cannot be")
        self.orders.put_nowait(message)

    def closed(self, port: SessionPort) -> None:
        self.gone.put_nowait(port)

    async def load(self) -> pb.LoadSnapshot:
        return pb.LoadSnapshot()


class Worker:
    """What a test holds."""

    def __init__(
        self,
        handler: Handler,
        sessions: WorkerSessions,
        direct: DirectPort,
        address: str,
        channels: ClusterChannels = CHANNELS,
    ) -> None:
        self.handler = handler
        self.channels = channels
        self.sessions = sessions
        self.direct = direct
        self.address = address
        self.stack = AsyncExitStack()

    async def open(self, *, can_move: bool = True) -> WorkerSession:
        """The session of a router; its channel stays open until the test ends."""
        connect = self.channels.connect if can_move else None
        channel = await self.stack.enter_async_context(self.channels.open(self.address))
        session = await WorkerSession.open(channel, session_settings(), self.address, connect)
        self.stack.callback(session.close)
        return session

    def converse(self, session: WorkerSession, registry: WatchedRegistry | None = None) -> asyncio.Task[str]:
        """Start carrying messages; ended with the test at the latest."""
        task = asyncio.create_task(session.converse(registry or Registry()))

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.stack.push_async_callback(end)
        return task


@asynccontextmanager
async def serving(credentials: ClusterCredentials | None = None) -> AsyncIterator[Worker]:
    """`credentials`: of both ends."""
    handler = Handler()
    async with asyncio.timeout(30.0), DirectPort("127.0.0.1", credentials) as direct:
        sessions = WorkerSessions(handler, direct=direct)
        server = make_server(ClusterAuth(SECRET))
        add_WorkerServicer_to_server(sessions, server)
        port = listen(server, "127.0.0.1", 0, None if credentials is None else credentials.grpc_server())
        await server.start()
        worker = Worker(handler, sessions, direct, f"127.0.0.1:{port}", ClusterChannels(credentials))
        try:
            yield worker
        finally:
            await worker.stack.aclose()
            sessions.finish()
            await server.stop(None)


class Registry(WatchedRegistry):
    """Counts snapshots of the prefix cache."""

    def __init__(self) -> None:
        super().__init__()
        self.has_snapshot = asyncio.Event()

    def prefix_changed(self, key: WorkerKey, change: PrefixChange) -> None:
        super().prefix_changed(key, change)
        self.has_snapshot.set()


@LOOPS
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_direct_session_carries_both_ways_and_ends_with_drain(
    make_loop: Callable[[], asyncio.AbstractEventLoop], is_tls: bool, tmp_path: Path
) -> None:
    """A megabyte in one turn included, and what the router says while the worker's last words are on their way."""
    credentials = ClusterCredentials(Authority().issue(tmp_path, name=MEMBER_NAME)) if is_tls else None
    run(make_loop, _converse_and_drain(credentials))


async def _converse_and_drain(credentials: ClusterCredentials | None) -> None:
    async with serving(credentials) as worker:
        session, registry = await worker.open(), Registry()
        assert isinstance(session._carrier, DirectCarrier)
        port = await worker.handler.ports.get()
        conversing = worker.converse(session, registry)
        await registry.has_snapshot.wait()
        session.resync()
        session.end_migration()
        kinds = [(await worker.handler.orders.get()).WhichOneof("kind") for _ in range(2)]
        assert kinds == ["resync", "cache_offer_ended"]
        port.send(pb.WorkerMessage(load=pb.LoadSnapshot(num_running=3)))
        await registry.until(lambda: any(one.load.num_running == 3 for one in registry.snapshots()))
        changes = [pb.KVEvent(block_hash=bytes([number % 256]) * 32, stored=True) for number in range(30_000)]
        port.send_events(0, changes)
        await registry.until(lambda: len(registry.prefix_map) > 0)
        worker.sessions.drain("a new version")
        worker.sessions.finish()
        for _ in range(100):
            session.resync()
        assert await conversing == "the worker has drained: a new version"
        assert await worker.handler.gone.get() is port
        assert worker.sessions.ports == frozenset()


async def test_direct_session_opened_during_drain_gets_drain_notice() -> None:
    async with serving() as worker:
        worker.sessions.drain("too late")
        session, registry = await worker.open(), Registry()
        worker.converse(session, registry)
        await registry.until(lambda: any(one.draining for one in registry.snapshots()))


async def test_direct_session_ends_when_router_closes_it() -> None:
    async with serving() as worker:
        session = await worker.open()
        port = await worker.handler.ports.get()
        conversing = worker.converse(session)
        await asyncio.sleep(0)
        conversing.cancel()
        assert await worker.handler.gone.get() is port
        assert port.closed


async def test_direct_session_of_router_that_does_not_read_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as worker:
        session = await worker.open()
        assert isinstance(session._carrier, DirectCarrier)
        session._carrier._connection._transport.pause_reading()
        port = await worker.handler.ports.get()
        message = pb.WorkerMessage(draining=pb.Draining(reason="x" * 4096))
        for _ in range(20):
            for _ in range(MAX_QUEUED_MESSAGES // 8):
                port.send(message)
            await asyncio.sleep(0)
        assert await worker.handler.gone.get() is port
        assert "reads too slowly" in caplog.text


async def test_direct_session_new_one_ends_routers_former_one() -> None:
    async with serving() as worker:
        first = worker.converse(await worker.open())
        former = await worker.handler.ports.get()
        worker.converse(await worker.open())
        present = await worker.handler.ports.get()
        assert await worker.handler.gone.get() is former
        assert await first == "the connection broke: the peer is gone"
        assert worker.sessions.ports == {present}


async def test_direct_session_with_invalid_order_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as worker:
        worker.handler.fails_at = "resync"
        session = await worker.open()
        conversing = worker.converse(session)
        await worker.handler.ports.get()
        session.resync()
        await worker.handler.gone.get()
        await conversing
    (record,) = [record for record in caplog.records if record.name == "worker.sessions"]
    assert record.exc_info is not None
    assert "this order cannot be" in str(record.exc_info[1])


async def test_direct_session_with_malformed_message_ends_as_protocol_error() -> None:
    async with serving() as worker:
        session = await worker.open()
        port = await worker.handler.ports.get()
        port.send(pb.WorkerMessage(hello=FakeWorker("d0").hello))
        assert await session.converse(Registry()) == "protocol error: unexpected hello"


async def _refused(address: str, _make: Callable[[], asyncio.Protocol]) -> None:
    raise ConnectionRefusedError(f"{address} is closed")


async def _stuck(_address: str, _make: Callable[[], asyncio.Protocol]) -> None:
    await asyncio.Event().wait()


async def _elsewhere(_address: str, make: Callable[[], asyncio.Protocol]) -> None:
    """To somebody who hangs up."""
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) as server:
        await CHANNELS.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", make)


async def _silent(_address: str, make: Callable[[], asyncio.Protocol]) -> None:
    """To somebody who accepts nothing, though the system does in his place."""
    await CHANNELS.connect(f"127.0.0.1:{_deaf_port[0]}", make)


_deaf_port: list[int] = []


@pytest.fixture(autouse=True, scope="module")
def deaf() -> Iterator[None]:
    with hold("127.0.0.1", 0) as held:
        _deaf_port[:] = [held.getsockname()[1]]
        yield


@pytest.mark.parametrize(
    ("connect", "reason"),
    [
        (_refused, "is closed"),
        (_stuck, "within 1.5 s"),
        (_elsewhere, "hung up: the connection broke: the peer is gone"),
        (_silent, "did not accept the session ticket within 1.5 s"),
    ],
)
async def test_direct_session_that_cannot_be_stays_with_grpc(
    connect: Connect, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries = 0

    async def counting(address: str, make: Callable[[], asyncio.Protocol]) -> None:
        nonlocal num_tries
        num_tries += 1
        await connect(address, make)

    async with serving() as worker:
        registry = Registry()
        fleet = WorkerFleet(
            directory=ChangingDirectory(stated_addresses(prefill=[], decode=[worker.address])),
            listener=registry,
            open_channel=CHANNELS.open,
            connect=counting,
            settings=session_settings(hello_timeout_s=1.5),
            rng=Random(1),
            backoff=Backoff(first_s=0.01, most_s=0.02),
        )
        async with fleet:
            await registry.has_snapshot.wait()
            (snapshot,) = registry.snapshots()
            assert not snapshot.info.is_direct
            (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert "remains on gRPC" in record.getMessage()
            assert reason in record.getMessage()
            assert worker.direct._offers == {}, "a ticket lives no longer than the call that it was given in"
            (port,) = worker.sessions.ports
            port.close()
            await registry.until(lambda: registry.num_left == 1)
            await registry.until_live(1)
            assert num_tries == 1, "the next session begins without the wait"


async def test_direct_session_is_offered_to_nobody_who_does_not_ask() -> None:
    """As routers of the previous version do not, and routers that are permissive."""
    async with serving() as worker:
        session = await worker.open(can_move=False)
        assert isinstance(session._carrier, GrpcCarrier)
        assert worker.direct._offers == {}


async def test_direct_session_that_registry_rejects_is_closed() -> None:
    class Full(Registry):
        def joined(self, info: WorkerInfo, port: object) -> None:
            raise RuntimeError("no")

    async with serving() as worker:
        session = await worker.open()
        port = await worker.handler.ports.get()
        with pytest.raises(RuntimeError, match="no"):
            await session.converse(Full())
        assert await worker.handler.gone.get() is port
