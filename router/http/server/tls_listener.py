"""Accepts TLS connections on a listening socket.

Each uses the certificates in force at that time, its handshake is bounded in time like a request's head, and handshakes
count as connections.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from router.access.tls import ServerTlsState
from router.http.server.connection_limits import ConnectionLimits

_FAREWELL_S = 2.0
"""Time for a client's own TLS shutdown after ours."""
_AT_ONCE = 64
_REST_S = 0.5
"""Pause when there are no file descriptors left."""
_log = logging.getLogger(__name__)


class TlsListener:
    """Accepts connections; has the interface of the servers that uvicorn manages."""

    def __init__(
        self,
        listening: socket.socket,
        state: ServerTlsState,
        limits: ConnectionLimits,
        make_room: Callable[[int], bool],
    ) -> None:
        """`make_room`: returns whether another connection may begin beside so many in their handshakes."""
        listening.setblocking(False)
        self._listening = listening
        self._state = state
        self._limits = limits
        self._make_room = make_room
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None

    def start(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Accept from now on; `make`: makes the protocol of each connection."""
        self._make = make
        self._resume()

    def close(self) -> None:
        """Accept no more; handshakes in progress continue."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """Return at once: there is nothing left to wait for."""

    def stop(self) -> None:
        """Abort handshakes in progress."""
        for task in self._tasks:
            task.cancel()

    def serve(self, connection: socket.socket) -> None:
        """Serve an accepted non-blocking socket, if there is room for it."""
        if not self._make_room(len(self._tasks)):
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._enter(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resume(self) -> None:
        self._rest = None
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("cannot accept a connection: %s", error.strerror)
                self.close()
                self._rest = asyncio.get_running_loop().call_later(_REST_S, self._resume)
                return
            connection.setblocking(False)
            self.serve(connection)

    async def _enter(self, connection: socket.socket) -> None:
        if self._make is None:
            raise RuntimeError("not started")
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                connection,
                ssl=self._state.identity.context,
                ssl_handshake_timeout=self._limits.head_timeout_s,
                ssl_shutdown_timeout=_FAREWELL_S,
            )
        except (OSError, ssl.SSLError, TimeoutError) as error:
            # Its transport is closed by then.
            _log.debug("no TLS: %s", error)
