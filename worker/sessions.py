"""A worker's end of its sessions with routers.

One long-lived stream per router. Messages to a router are queued on its `SessionPort` and written by one task, so the
engine's events never wait for a slow reader: a port that overflows is closed, and its router's requests with it.
"""

import asyncio
import logging
from itertools import count
from typing import Any, Protocol

import grpc

from tandem.protocol.session_versions import SPOKEN, worker_dialect
from tandem.protocol.version_negotiation import NoCommonVersion, VersionRange
from tandem.rpc.health import health_handler
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.values.ids import Incarnation
from worker.session_port import LOAD_PERIOD_S, EventSink, SessionPort, orders_of

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


class WorkerSessions(WorkerServicer):
    """All sessions of one worker; the `Worker` service."""

    def __init__(self, handler: SessionHandler, publisher: Publisher | None = None) -> None:
        """`publisher`: routers that read its entries in Redis get no cache events in their sessions."""
        self._handler = handler
        self._publisher = publisher
        self._report_numbers = count(1)
        self._ports: set[SessionPort] = set()
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

    async def send_loads(self) -> None:
        """Send load reports forever, so that a router notices a worker that has stopped sending."""
        while True:
            load = await self._handler.load()
            load.report_number = next(self._report_numbers)
            if self._publisher is not None:
                load.redis_publishing.CopyFrom(self._publisher.report())
            self.broadcast(pb.WorkerMessage(load=load))
            await asyncio.sleep(LOAD_PERIOD_S)

    async def Session(self, _requests: Any, context: Any) -> None:
        """Serve one router until it disconnects."""
        first = await context.read()
        if not isinstance(first, pb.RouterMessage) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        port = await self._port_for(first.hello, context)
        port.send(pb.WorkerMessage(hello=self._handler.hello()))
        if self._draining is not None:
            port.send(pb.WorkerMessage(draining=pb.Draining(reason=self._draining)))
        self._ports.add(port)
        self._handler.opened(port)
        try:
            await self._converse(port, context)
        finally:
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
            Incarnation(hello.incarnation), wants_events=not reads_redis, dialect=worker_dialect(version)
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
                for order in orders_of(message):
                    if order.HasField("end_earlier_sessions"):
                        self._end_earlier(port)
                    else:
                        self._handler.order(port, order)
        finally:
            port.close()

    def _end_earlier(self, port: SessionPort) -> None:
        for other in self._ports - {port}:
            if other.router == port.router:
                _log.info("router %x has opened a new session: closing its earlier one", port.router)
                other.close()
