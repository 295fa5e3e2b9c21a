"""A worker's end of its sessions with routers.

One long-lived stream per router: a call over gRPC, or, for routers that can, a connection to the worker's `DirectPort`
after the HELLOs. Messages to a router are queued on its `SessionPort`, so the engine's events never wait for a slow
reader: a port that overflows is closed, and its router's requests with it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

import grpc

from tandem.protocol.session_versions import LOAD_PERIOD_S, SPOKEN, worker_dialect
from tandem.protocol.version_negotiation import NoCommonVersion, VersionRange
from tandem.rpc.framed_connection import FramedConnection
from tandem.rpc.health import health_handler
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.values.ids import Incarnation
from worker.direct_port import DirectPort
from worker.session_port import EventSink, SessionPort, orders_of

_LEAST_LOAD_PERIOD_S = 0.05
"""However many sessions begin."""
_log = logging.getLogger(__name__)


class SessionHandler(Protocol):
    """The worker behind the sessions; called on the event loop."""

    def hello(self) -> pb.WorkerHello:
        """Describe this worker to a router."""
        ...

    def opened(self, port: SessionPort) -> None:
        """Handle a new session: send a snapshot of the prefix cache, then events, if the router wants them."""
        ...

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        """Handle a message after the hello."""
        ...

    def closed(self, port: SessionPort) -> None:
        """Handle the end of a session: drop its router's work here."""
        ...

    async def load(self) -> pb.LoadSnapshot:
        """Report the worker's load."""
        ...


class Publisher(EventSink, Protocol):
    """Publishes the prefix cache to all routers at once (`worker.cluster_state.redis_publisher`)."""

    def report(self) -> pb.RedisPublisherReport: ...


class DirectSession:
    """Handles the frames of one session at the direct port (FrameHandler)."""

    def __init__(
        self,
        port: SessionPort,
        connection: FramedConnection,
        *,
        on_orders: Callable[[SessionPort, pb.RouterMessage], None],
        on_end: Callable[[SessionPort], None],
    ) -> None:
        self._port = port
        self._connection = connection
        self._on_orders = on_orders
        self._on_end = on_end
        port.attach(self._on_change)

    def _on_change(self) -> None:
        if self._port.closed:
            # Not later: a peer that does not read would keep it open.
            self._connection.abort()
        elif self._port.finished:
            self._connection.finish()
        else:
            self._connection.wake()

    def next_frame(self) -> bytes | None:
        message = self._port.pop()
        return None if message is None else message.SerializeToString()

    def on_frame(self, frame: bytes) -> None:
        self._on_orders(self._port, pb.RouterMessage.FromString(frame))

    def on_lost(self, error: Exception | None) -> None:
        if error is not None and not isinstance(error, OSError):
            _log.warning("the session with router %x failed", self._port.router, exc_info=error)
        self._on_end(self._port)


class WorkerSessions(WorkerServicer):
    """All sessions of one worker; the `Worker` service."""

    def __init__(
        self, handler: SessionHandler, publisher: Publisher | None = None, direct: DirectPort | None = None
    ) -> None:
        """`publisher`: routers that read its entries in Redis get no cache events in their sessions. `direct`: where
        sessions go on; None: they stay with gRPC.
        """
        self._handler = handler
        self._publisher = publisher
        self._direct = direct
        self._report_numbers = count(1)
        self._ports: set[SessionPort] = set()
        self._has_new_port = asyncio.Event()
        self._draining: str | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Serve sessions and the health service, which reports whether the worker accepts work."""
        add_WorkerServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        server.add_generic_rpc_handlers((health_handler(self.takes_work),))

    def takes_work(self) -> bool:
        """Whether the worker accepts work, that is, is not draining."""
        return self._draining is None

    @property
    def ports(self) -> frozenset[SessionPort]:
        return frozenset(self._ports)

    @property
    def event_sinks(self) -> list[EventSink]:
        """Receivers of the prefix cache's events."""
        sinks: list[EventSink] = [port for port in self._ports if port.wants_events]
        return sinks if self._publisher is None else [*sinks, self._publisher]

    def broadcast(self, message: pb.WorkerMessage) -> None:
        for port in self._ports:
            port.send(message)

    def drain(self, reason: str) -> None:
        """Tell every router, current and future, that this worker accepts no new work."""
        self._draining = reason
        self.broadcast(pb.WorkerMessage(draining=pb.Draining(reason=reason)))

    def finish(self) -> None:
        """End every session once its queued messages are written, which include the last tokens of a drain."""
        for port in self._ports:
            port.finish()

    async def end(self) -> None:
        """Finish every session, and wait a short time until those at the direct port are over."""
        self.finish()
        if self._direct is not None:
            await self._direct.close()

    async def send_loads(self) -> None:
        """Send load reports forever, so that a router notices a worker that has stopped sending.

        A new session gets one at once.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._has_new_port.clear()
            began_s = loop.time()
            load = await self._handler.load()
            load.report_number = next(self._report_numbers)
            if self._publisher is not None:
                load.redis_publishing.CopyFrom(self._publisher.report())
            self.broadcast(pb.WorkerMessage(load=load))
            # The reports are numbered alike for all routers, so the one that wants most of them decides.
            period_s = min((port.load_period_s for port in self._ports), default=LOAD_PERIOD_S)
            await asyncio.sleep(_LEAST_LOAD_PERIOD_S)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began_s + period_s):
                    await self._has_new_port.wait()

    async def Session(self, _requests: Any, context: Any) -> None:
        """Serve one router until it disconnects, or goes on at the direct port."""
        first = await context.read()
        if not isinstance(first, pb.RouterMessage) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        port = await self._port_for(first.hello, context)
        hello = self._handler.hello()
        if self._direct is not None and first.hello.direct:
            await self._move(self._direct, port, hello, context)
            return
        port.send(pb.WorkerMessage(hello=hello))
        self._open(port)
        try:
            await self._converse(port, context)
        finally:
            self._close(port)

    async def _move(self, direct: DirectPort, port: SessionPort, hello: pb.WorkerHello, context: Any) -> None:
        """Keep the call open, and the ticket good, until the router has shown it; the end of the call says so."""
        has_begun = asyncio.Event()
        ticket = direct.offer(partial(self._start, port, has_begun))
        try:
            hello.direct_port, hello.direct_ticket = direct.port, ticket
            await context.write(pb.WorkerMessage(hello=hello))
            await has_begun.wait()
        finally:
            direct.withdraw(ticket)

    def _start(self, port: SessionPort, has_begun: asyncio.Event, connection: FramedConnection) -> DirectSession:
        """Begin a session on its direct connection."""
        session = DirectSession(port, connection, on_orders=self._take_orders, on_end=self._close)
        try:
            self._open(port)
        except BaseException:
            self._close(port)
            raise
        has_begun.set()
        return session

    def _open(self, port: SessionPort) -> None:
        if self._draining is not None:
            port.send(pb.WorkerMessage(draining=pb.Draining(reason=self._draining)))
        self._ports.add(port)
        self._has_new_port.set()
        self._handler.opened(port)

    def _close(self, port: SessionPort) -> None:
        port.close()
        self._ports.discard(port)
        self._handler.closed(port)

    async def _port_for(self, hello: pb.RouterHello, context: Any) -> SessionPort:
        try:
            version = SPOKEN.negotiate(VersionRange.from_hello(hello.protocol_version, hello.newest_version))
        except NoCommonVersion as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        reads_redis = self._publisher is not None and hello.reads_redis
        return SessionPort(
            Incarnation(hello.incarnation),
            wants_events=not reads_redis,
            dialect=worker_dialect(version),
            load_period_s=hello.load_period_s,
        )

    async def _converse(self, port: SessionPort, context: Any) -> None:
        reader = asyncio.create_task(self._read(port, context))
        writer = asyncio.create_task(self._write(port, context))
        closed = asyncio.create_task(port.wait_closed())
        try:
            # A write waits while the router does not read; closing the port must end it nevertheless.
            await asyncio.wait({writer, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (tasks := (reader, writer, closed)):
                task.cancel()
            for fault in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(fault, Exception):
                    _log.warning("the session with router %x failed", port.router, exc_info=fault)

    async def _write(self, port: SessionPort, context: Any) -> None:
        try:
            while (message := await port.next()) is not None:
                await context.write(message)
        except grpc.aio.InternalError:
            _log.info("router %x disconnected while a message was being written", port.router)

    async def _read(self, port: SessionPort, context: Any) -> None:
        try:
            while isinstance(message := await context.read(), pb.RouterMessage):
                self._take_orders(port, message)
        finally:
            port.close()

    def _take_orders(self, port: SessionPort, message: pb.RouterMessage) -> None:
        for order in orders_of(message):
            if order.HasField("end_earlier_sessions"):
                self._end_earlier(port)
            else:
                self._handler.order(port, order)

    def _end_earlier(self, port: SessionPort) -> None:
        for other in self._ports - {port}:
            if other.router == port.router:
                _log.info("router %x has opened a new session: closing its earlier one", port.router)
                other.close()
