"""The socket of the HTTP door: uvicorn with bounded headers, started and stopped by its owner."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.handover import leave_port
from router.http.link import EXTENSION
from router.http.middleware import MAX_HEADER_BYTES

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
_LOOK_S = 0.05
_MAX_URL_BYTES = 8 << 10
_MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""Beyond what the application answers with 400, the connection is closed: a head may otherwise be endless."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with bounded heads (httptools itself collects without a bound), and a `Link` for each request."""

    _head_bytes = 0
    _links: "tuple[_DirectLink, ...]" = ()
    """Of requests without a complete answer: several when a client sends the next ones ahead."""

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url), _MAX_URL_BYTES)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value), _MAX_HEAD_BYTES)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The application has not begun: its task runs later.
        link = _DirectLink(self)
        self._links = (*self._links, link)
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: link}

    def on_response_complete(self) -> None:
        self._links = tuple(link for link in self._links if not link.answered())
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for link in self._links:
            link.client_left()
        self._links = ()

    def _count(self, size: int, most: int) -> None:
        self._head_bytes += size
        if self._head_bytes > most:
            # uvicorn answers a parser's error with 400 and closes.
            raise ValueError("request head too large")


class _DirectLink:
    """One request's `router.http.link.Link`."""

    def __init__(self, protocol: _Protocol) -> None:
        self._write = protocol.transport.write
        self._flow = protocol.flow
        self._cycle: RequestResponseCycle | None = protocol.cycle
        """Until nothing more can be said: its scope holds this link, and only a collection would find the two."""
        self._on_leave: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def write(self, body: bytes) -> bool:
        if self._cycle is None or self._cycle.disconnected:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return self._flow.write_paused

    def whole_body(self) -> bytes | None:
        return None if self._cycle is None or self._cycle.more_body else bytes(self._cycle.body)

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        self._on_leave = callback
        if callback is None:
            return
        # Nobody hears of an end behind a body that is too large to be read on.
        self._flow.resume_reading()
        if self._cycle is None or self._cycle.disconnected:
            callback()

    def answered(self) -> bool:
        """Whether the whole answer has been written; if so the link has ended."""
        if self._cycle is not None and self._cycle.response_complete:
            self._cycle = None
        return self._cycle is None

    def client_left(self) -> None:
        """uvicorn tells the newest request alone."""
        cycle, self._cycle = self._cycle, None
        if cycle is None or cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if self._on_leave is not None:
            self._on_leave()


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to the process that owns it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpDoor:
    """Listens while entered; leaving stops new connections and lets running requests end within `grace_s`."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, grace_s: float = 30.0, shares_port: bool = False) -> None:
        """`shares_port`: other processes listen on it, too; the kernel gives each connection to one of them."""
        self._shares_port = shares_port
        self._host = host
        self._grace_s = grace_s
        self.port = port
        """The real port once entered; port 0 takes a free one."""
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        """Raises OSError when the address is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server(
            (self._host, self.port), family=family, backlog=_BACKLOG, reuse_port=self._shares_port
        )
        self.port = self._socket.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(self._grace_s)

    async def hand_over(self, most_s: float) -> None:
        """Leave what is new to the other processes, and serve who is connected, at most for so long."""
        if self._socket is None:
            return
        await leave_port(self._server, self._socket)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self._server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(_LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections; running requests may end within `grace_s`. Once is enough."""
        if self._task is None or self._socket is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task
        self._socket.close()
        self._task = self._socket = None
