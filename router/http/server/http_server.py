"""The HTTP server: uvicorn with bounded connections, started and stopped by its owner.

`uvicorn.Server` has no public way to leave signals alone or to accept connections elsewhere, and its protocol none to
bound heads (`router.http.server.connection`). So the overrides here are of uvicorn's internals, and pyproject.toml caps
its version: raise the cap only with `tests/unit/router/http/server` green.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from starlette.types import ASGIApp

from router.access.tls import ServerTlsState
from router.api.slow_client import WRITE_TIMEOUT_S
from router.http.server.connection import Connection, ConnectionWatch
from router.http.server.connection_limits import ConnectionLimits, ConnectionTable
from router.http.server.shared_port import end_behind_answers, leave_port, new_protocol
from router.http.server.tls_listener import TlsListener
from tandem.config.servers import ConnectionsConfig

_BACKLOG = 2048
_POLL_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process that owns it, and TLS to a listener of ours."""

    secured: TlsListener | None = None
    """Accepts the connections instead of uvicorn."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.secured is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self.secured.start(new_protocol(self))
        self.servers.append(cast("Any", self.secured))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Listens while entered; leaving stops new connections and lets running requests end within `grace_s`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        grace_s: float = 30.0,
        shares_port: bool = False,
        limits: ConnectionLimits | None = None,
        tls: ServerTlsState | None = None,
    ) -> None:
        """`shares_port`: other processes listen on it, too; the kernel gives each connection to one of them. `tls`:
        None for plaintext."""
        self._shares_port = shares_port
        self._host = host
        self._grace_s = grace_s
        self.port = port
        """The actual port once entered; port 0 picks a free one."""
        limits = limits or ConnectionLimits.from_config(
            ConnectionsConfig(), most=_BACKLOG, write_timeout_s=WRITE_TIMEOUT_S
        )
        self._connections: ConnectionTable[Connection] = ConnectionTable(limits)
        self._watch: ConnectionWatch | None = None
        self._tls = tls
        self._server = _Server(
            uvicorn.Config(
                app,
                # uvicorn calls it as if it were a class.
                http=cast("Any", self._new_connection),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._socket: socket.socket | None = None
        self._inherited: socket.socket | None = None
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        """Bind and start. Raises OSError when the address is taken."""
        self._socket = self._inherited or self._listen()
        self.port = self._socket.getsockname()[1]
        self._watch = ConnectionWatch(self._connections, asyncio.get_running_loop())
        if self._tls is not None:
            self._server.secured = TlsListener(self._socket, self._tls, self._connections.limits, self._watch.make_room)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    def inherit(self, listening: socket.socket) -> None:
        """Use a predecessor's listening socket instead of a new one; call this before entering."""
        self._inherited = listening

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        return socket.create_server(
            (self._host, self.port), family=family, backlog=_BACKLOG, reuse_port=self._shares_port
        )

    @property
    def listening(self) -> socket.socket:
        """The listening socket, while entered."""
        if self._socket is None:
            raise RuntimeError("the server is not started")
        return self._socket

    @property
    def num_connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    @property
    def scheme(self) -> str:
        return "http" if self._tls is None else "https"

    def _new_connection(self, **others: Any) -> Connection:
        if self._watch is None:
            raise RuntimeError("the server is not started")
        return Connection(self._watch, **others)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(self._grace_s)

    async def hand_over(self, *, idle_s: float, most_s: float, is_inherited: bool = False) -> None:
        """Leave new connections to the other processes, and serve the present ones until they have sent no request for
        `idle_s`, at most for `most_s`. `is_inherited`: another process has the same socket.
        """
        if self._socket is None or self._watch is None:
            return
        await leave_port(self._server, self._socket, self._server.secured, is_inherited=is_inherited)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + most_s
        while self._server.server_state.connections and loop.time() < ends_s:  # uvicorn has no notification
            self._watch.close_idle(idle_s)
            await asyncio.sleep(_POLL_S)
        end_behind_answers(self._server)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections; running requests may finish within `grace_s`. Idempotent."""
        if self._task is None or self._socket is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task
        if self._watch is not None:
            self._watch.stop()
        if self._server.secured is not None:
            self._server.secured.stop()
        self._socket.close()
        self._task = self._socket = None
