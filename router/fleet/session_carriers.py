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
from tandem.rpc.framed_connection import FramedConnection, FrameError
from tandem.v1 import session_pb2 as pb

_OPEN_TIMEOUT_S = 2.0
"""Longest time to go over to a worker's direct port: a firewall may drop what comes to it without a word."""

NextOrder = Callable[[], pb.RouterMessage | None]
"""Returns the next message to send; None: there is none now."""
OnMessage = Callable[[pb.WorkerMessage], None]
"""Handles a message of the worker. Raises ProtocolError."""
Connect = Callable[[str, Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Opens a connection to host:port for a protocol (`ClusterChannels.connect`). Raises OSError or ConfigError."""


class SessionCarrier(Protocol):
    """Carries messages both ways."""

    def wake(self) -> None:
        """Send what `next_order` returns, soon."""
        ...

    async def run(self, next_order: NextOrder, on_message: OnMessage) -> str:
        """Carry messages until either side ends; return why, or "" if the worker did and gave no reason."""
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
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, connect: Connect, address: str, ticket: bytes, call: Any) -> "DirectCarrier":
        """Connect and show the ticket; the worker ends the call in which it gave it once it has seen it.

        Raises OSError, which a timeout is, ConfigError, ProtocolError or grpc.aio.AioRpcError.
        """
        carrier = cls(ticket)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await connect(address, carrier._accept)
                if await call.read() is not grpc.aio.EOF:
                    raise ProtocolError("the worker said more than hello before it saw the ticket")
                if await call.code() is not grpc.StatusCode.OK:
                    raise ProtocolError(f"the worker ended the call: {await call.details()}")
        except TimeoutError:
            carrier.close()
            raise TimeoutError(f"the worker did not see the ticket within {_OPEN_TIMEOUT_S:g} s") from None
        except BaseException:
            carrier.close()
            raise
        return carrier

    def _accept(self) -> FramedConnection:
        return self._connection

    def wake(self) -> None:
        self._connection.wake()

    async def run(self, next_order: NextOrder, on_message: OnMessage) -> str:
        self._next_order, self._on_message = next_order, on_message
        self._connection.wake()
        self._connection.resume_reading()
        return await self._ended

    def close(self) -> None:
        self._connection.abort()

    def next_frame(self) -> bytes | None:
        if (ticket := self._ticket) is not None:
            self._ticket = None
            # What the worker says from now on is read when `run` has been told to whom to say it.
            self._connection.pause_reading()
            return ticket
        if self._next_order is None or (order := self._next_order()) is None:
            return None
        return order.SerializeToString()

    def on_frame(self, frame: bytes) -> None:
        assert self._on_message is not None  # noqa: S101  # narrows: nothing is read before `run`
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
