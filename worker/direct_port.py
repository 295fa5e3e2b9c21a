"""Where sessions go on after their HELLO: connections that carry messages without gRPC.

A message over gRPC costs each side several times as much (ADR 30). So a router that has said HELLO gets a ticket, which
is good for one connection to this port while its call is open: gRPC's interceptor alone finds out who belongs to the
cluster, and with `cluster.tls` both ends of the connection show their certificates as well.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from tandem.protocol.session_versions import DIRECT_TICKET_BYTES
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.framed_connection import MAX_FRAME_BYTES, FramedConnection, FrameError, FrameHandler
from tandem.rpc.hosts import join, keep_alive
from tandem.rpc.refusal_log import RefusalLog

MAX_UNKNOWN = 128
"""Maximum number of connections whose ticket has not come. Anybody may open one."""
_TICKET_S = 5.0
"""Longest time from the connection to the ticket, the TLS handshake included."""
_FLUSH_S = 0.5
"""Longest time for peers to read the last messages when the port closes."""
_RETRY_S = 1.0
_log = logging.getLogger(__name__)

StartSession = Callable[[FramedConnection], FrameHandler]
"""Starts the session of a ticket on its connection, and returns who handles its frames."""


class DirectPort:
    """Listens while entered."""

    def __init__(self, host: str, credentials: ClusterCredentials | None) -> None:
        """`credentials`: None for connections in the clear."""
        self._host = host
        self._credentials = credentials
        self.port = 0
        self._offers: dict[bytes, StartSession] = {}
        self._is_wanted = asyncio.Event()
        """Set while a ticket is out: strangers find nobody at other times, and cost no handshakes."""
        self._num_unknown = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._refusals = RefusalLog("port for sessions")
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Listen. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, 0), family=family, backlog=MAX_UNKNOWN // 2)
        except OSError as error:
            raise OSError(f"cannot listen on {join(self._host, 0)}: {error.strerror or error}") from None
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close, once peers have the last messages of sessions that were finished, or after a short time."""
        assert self._accepting is not None and self._socket is not None  # noqa: S101, PT018  # narrows: it was entered
        self._offers.clear()
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._socket.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_FLUSH_S)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def offer(self, start: StartSession) -> bytes:
        """Return a new ticket; `start` is called when it is shown."""
        ticket = secrets.token_bytes(DIRECT_TICKET_BYTES)
        self._offers[ticket] = start
        self._is_wanted.set()
        return ticket

    def withdraw(self, ticket: bytes) -> None:
        """Make a ticket worthless, unless it was shown before."""
        self._offers.pop(ticket, None)
        if not self._offers:
            self._is_wanted.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._is_wanted.wait()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, say
                self._refusals.record("cannot accept a connection", error, level=logging.WARNING)
                await asyncio.sleep(_RETRY_S)
                continue
            if not self._is_wanted.is_set():  # the last ticket was withdrawn while nobody came
                accepted.close()
                continue
            if self._num_unknown >= MAX_UNKNOWN:
                self._refusals.record("a connection was refused", f"{MAX_UNKNOWN} have shown no ticket yet")
                accepted.close()
                continue
            self._num_unknown += 1
            task = asyncio.create_task(self._serve(accepted))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        """Wait for the ticket, then until the connection is over."""
        newcomer = _Newcomer(self._offers)
        connection = newcomer.connection
        try:
            try:
                await self._admit(accepted, newcomer)
            finally:
                self._num_unknown -= 1
            await connection.lost.wait()
        except TimeoutError:
            self._refusals.record("a connection was refused", f"no ticket within {_TICKET_S:g} s")
        except (OSError, FrameError) as error:  # ssl.SSLError, too
            self._refusals.record("a connection was refused", error)
        except Exception:  # noqa: BLE001  # whatever a new session's handler raises is that session's end
            _log.exception("a session could not begin")
        finally:
            connection.abort()

    async def _admit(self, accepted: socket.socket, newcomer: "_Newcomer") -> None:
        """Raises OSError, TimeoutError or FrameError."""
        try:
            keep_alive(accepted)
            context = None if self._credentials is None else self._credentials.server_context()
            async with asyncio.timeout(_TICKET_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: newcomer.connection, accepted, ssl=context
                )
                await newcomer.admitted
        except BaseException:
            if not newcomer.connection.was_open:
                accepted.close()
            raise


async def open_direct_port(
    stack: AsyncExitStack, host: str, credentials: ClusterCredentials | None
) -> DirectPort | None:
    """Open a worker's direct port until `stack` ends. Raises OSError.

    None where `credentials` are permissive: the port would have to take connections of both kinds.
    """
    if credentials is not None and credentials.is_permissive:
        return None
    return await stack.enter_async_context(DirectPort(host.strip("[]"), credentials))


class _Newcomer:
    """Handles a connection until it has shown its ticket."""

    def __init__(self, offers: dict[bytes, StartSession]) -> None:
        self.connection = FramedConnection(self, max_frame_bytes=DIRECT_TICKET_BYTES)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers = offers

    def next_frame(self) -> bytes | None:
        return None

    def on_frame(self, frame: bytes) -> None:
        """Start the session of the ticket, which is used up. Raises FrameError."""
        if (start := self._offers.pop(frame, None)) is None:
            raise FrameError("its ticket is unknown, or was used")
        self.connection.max_frame_bytes = MAX_FRAME_BYTES
        self.connection.handler = start(self.connection)
        self.admitted.set_result(None)

    def on_lost(self, error: Exception | None) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error or FrameError("it hung up"))
