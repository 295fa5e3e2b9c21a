"""What carries the messages of a session with a worker: the gRPC call in which it began, or a connection of its own.

A message over gRPC costs several times as much processor time as one over a connection (ADR 30). gRPC remains for
workers of the previous version, for `cluster.tls.mode: permissive`, and for firewalls that let one port through.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from router.fleet.session_wire import ProtocolError, batch_orders
from tandem.errors import ConfigError
from tandem.rpc.framed_connection import FramedConnection, FrameError
from tandem.v1 import session_pb2 as pb

NextOrder = Callable[[], pb.RouterMessage | None]
"""Returns the next message to send; None: there is none now."""
OnMessage = Callable[[pb.WorkerMessage], None]
"""Handles a message of the worker. Raises ProtocolError."""
Connect = Callable[[str, Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Opens a connection to host:port for a protocol (`ClusterChannels.connect`). Raises OSError or ConfigError."""


class DirectFailed(Exception):
    """A session could not go over to a connection of its own; the text says why."""


class SessionCarrier(Protocol):
    """Carries messages both ways."""

    def wake(self) -> None:
        """Send what `next_order` returns, soon."""
        ...

    async def run(self, next_order: NextOrder, on_message: OnMessage) -> str:
        """Carry messages until either side ends; return why, or "" when it was in order."""
        ...

    def close(self) -> None:
        """End at once."""
        ...


class GrpcCarrier:
    """The call in which the HELLOs were exchanged."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._has_orders = asyncio.Event()

    def wake(self) -> None:
        self._has_orders.set()

    async def run(self, next_order: NextOrder, on_message: OnMessage) -> str:
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(self._write(next_order))
            reason = await self._read(on_message)
            writer.cancel()
        return reason

    def close(self) -> None:
        self._call.cancel()

    async def _write(self, next_order: NextOrder) -> None:
        while True:
            await self._has_orders.wait()
            self._has_orders.clear()
            while (batch := batch_orders(next_order)) is not None:
                try:
                    await self._call.write(batch)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader sees the same end and reports it

    async def _read(self, on_message: OnMessage) -> str:
        while True:
            try:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    return str(await self._call.details() or "")
                on_message(message)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except ProtocolError as error:
                return f"protocol error: {error}"


class DirectCarrier:
    """A connection to the worker's direct port; handles its frames (FrameHandler)."""

    def __init__(self, ticket: bytes) -> None:
        self._ticket: bytes | None = ticket
        self._next_order: NextOrder | None = None
        self._on_message: OnMessage | None = None
        self._connection = FramedConnection(self)
        self._early: list[bytes] = []
        """What the worker said before `run`."""
        self._is_ready = False
        """Whether the worker has taken the ticket."""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, connect: Connect, address: str, ticket: bytes, call: Any, *, timeout_s: float
    ) -> "DirectCarrier":
        """Connect and show the ticket. When the worker has seen it, it ends the call in which it gave it.

        Raises DirectFailed, after `timeout_s` at the latest: a firewall may drop what comes without a word.
        """
        carrier = cls(ticket)
        try:
            await carrier._open(connect, address, call, timeout_s)
        except (OSError, ConfigError) as error:
            raise DirectFailed(f"no connection to {address}: {error}") from None
        except grpc.aio.AioRpcError as error:
            raise DirectFailed(f"{error.code().name}: {error.details()}") from None
        finally:
            if not carrier._is_ready:
                carrier.close()
        return carrier

    async def _open(self, connect: Connect, address: str, call: Any, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(end_s):
                await connect(address, lambda: self._connection)
        except TimeoutError:
            raise DirectFailed(f"no connection to {address} within {timeout_s:g} s") from None
        seen = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({seen, self._ended}, timeout=end_s - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise DirectFailed(f"{address} hung up: {self._ended.result() or 'without a reason'}")
            if not seen.done():
                raise DirectFailed(f"{address} did not accept the session ticket within {timeout_s:g} s")
            if seen.result() is not grpc.aio.EOF or await call.code() is not grpc.StatusCode.OK:
                raise DirectFailed(f"the worker did not end its call properly: {await call.details()}")
        finally:
            seen.cancel()
            await asyncio.gather(seen, return_exceptions=True)
        self._is_ready = True

    def wake(self) -> None:
        self._connection.wake()

    async def run(self, next_order: NextOrder, on_message: OnMessage) -> str:
        self._next_order, self._on_message = next_order, on_message
        self._connection.wake()
        early, self._early = self._early, []
        try:
            for frame in early:
                self.on_frame(frame)
        except (ProtocolError, DecodeError) as error:
            return f"protocol error: {error}"
        return await self._ended

    def close(self) -> None:
        self._connection.abort()

    def next_frame(self) -> bytes | None:
        if (ticket := self._ticket) is not None:
            self._ticket = None
            return ticket
        if self._next_order is None or (order := self._next_order()) is None:
            return None
        return order.SerializeToString()

    def on_frame(self, frame: bytes) -> None:
        if self._on_message is None:
            self._early.append(frame)
        else:
            self._on_message(pb.WorkerMessage.FromString(frame))

    def on_lost(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        match error:
            case None:
                self._ended.set_result("")
            case OSError():
                self._ended.set_result(f"the connection broke: {error.strerror or error}")
            case ProtocolError() | FrameError() | DecodeError():
                self._ended.set_result(f"protocol error: {error}")
            case _:
                self._ended.set_exception(error)
