"""The HTTP server's bounds on connections, over real sockets: silent, slow and too many of them."""

import asyncio
import hashlib
import inspect
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.server.connection import Connection, ConnectionWatch
from router.http.server.connection_limits import ConnectionLimits, ConnectionTable
from router.http.server.http_server import HttpServer

WAIT_S = 20.0
ASK = b"GET / HTTP/1.1\r\nHost: r\r\n\r\n"
LONG_S = 600.0


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the request's body."""
    await Response("hello")(scope, receive, send)


class Client:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self) -> bytes:
        self.writer.write(ASK)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
        return head + await self.reader.readexactly(int(length.removeprefix(b"content-length: ")))

    async def drip(self, data: bytes) -> None:
        """One byte at a time, until the server closes the connection."""
        closing = asyncio.create_task(self.reader.read(1))
        for byte in data:
            self.writer.write(bytes([byte]))
            done, _ = await asyncio.wait({closing}, timeout=0.01)
            if done:
                break
        else:
            pytest.fail("the server took all of it")
        await self.closed(closing)

    async def closed(self, reading: asyncio.Task[bytes] | None = None) -> None:
        """Return when the server has closed it."""
        try:
            rest = await (reading or self.reader.read())
        except ConnectionError:
            rest = b""
        assert rest == b""


class Opened:
    """An open server and its connections."""

    def __init__(self, http: HttpServer) -> None:
        self.http = http
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.http.port))
        self.clients.append(client)
        return client


@asynccontextmanager
async def listener(app: ASGIApp = hello, *, most: int = 100, **timeouts: float) -> AsyncIterator[Opened]:
    bounds = {"head_timeout_s": LONG_S, "keep_alive_s": LONG_S, "write_timeout_s": LONG_S} | timeouts
    limits = ConnectionLimits(most=most, **bounds)
    async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0, limits=limits) as http, asyncio.timeout(WAIT_S):
        opened = Opened(http)
        try:
            yield opened
        finally:
            for client in opened.clients:
                client.writer.close()


@pytest.mark.parametrize("begun", [b"", b"POST / HTTP/1.1\r\nHost: r\r\nX-A: "])
async def test_connection_without_request_is_closed(begun: bytes) -> None:
    async with listener(head_timeout_s=0.1) as opened:
        client = await opened.connect()
        client.writer.write(begun)
        await client.closed()
        assert opened.http.num_connections == 0


async def test_connection_dripping_head_is_cut_off() -> None:
    async with listener(head_timeout_s=0.1) as opened:
        await (await opened.connect()).drip(b"GET / HTTP/1.1\r\nX-A: " + b"a" * 5000)


@pytest.mark.parametrize("next_bytes", [b"GET /" + b"a" * 5000, b"\r\n" * 2500])
async def test_connection_dripping_next_head_is_cut_off(next_bytes: bytes) -> None:
    async with listener(head_timeout_s=0.1, keep_alive_s=0.1) as opened:
        client = await opened.connect()
        assert (await client.ask()).endswith(b"hello")
        await client.drip(next_bytes)


async def test_connection_dripping_body_after_answer_is_cut_off() -> None:
    async with listener(head_timeout_s=0.1) as opened:
        client = await opened.connect()
        client.writer.write(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 6000\r\n\r\n")
        await client.reader.readuntil(b"hello")
        await client.drip(b"a" * 5000)


async def test_connection_idle_after_answer_is_closed() -> None:
    async with listener(keep_alive_s=0.1) as opened:
        client = await opened.connect()
        for _ in range(3):
            assert (await client.ask()).endswith(b"hello")
        await client.closed()
        assert opened.http.num_connections == 0


async def test_connection_with_slow_answer_stays_open() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await hello(scope, receive, send)

    async with listener(slow, head_timeout_s=0.1, keep_alive_s=0.1, write_timeout_s=0.1) as opened:
        silent = await opened.connect()
        response = asyncio.create_task((await opened.connect()).ask())
        await silent.closed()
        silent = await opened.connect()
        await silent.closed()
        go.set()
        assert (await response).endswith(b"hello")


async def test_connections_silent_beyond_bound_make_way() -> None:
    async with listener(most=8) as opened, httpx.AsyncClient(trust_env=False) as client:
        kept = await opened.connect()
        await kept.ask()
        silent = [await opened.connect() for _ in range(40)]
        for _ in range(4):
            assert (await client.get(f"http://127.0.0.1:{opened.http.port}/")).text == "hello"
        assert opened.http.num_connections == 8
        for one in silent[:30]:
            await one.closed()
        await kept.closed()


async def test_connections_with_requests_are_not_closed_for_others() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        requests.release()
        await go.wait()
        await hello(scope, receive, send)

    requests = asyncio.Semaphore(0)
    async with listener(slow, most=2) as opened:
        response = [asyncio.create_task((await opened.connect()).ask()) for _ in range(2)]
        for _ in response:
            await requests.acquire()
        refused = await (await opened.connect()).reader.read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"unavailable"' in refused
        go.set()
        for one in response:
            assert (await one).endswith(b"hello")


@pytest.mark.parametrize(
    ("size", "num_requests", "headers"), [(8 << 20, 1, {}), (8 << 20, 1, {"Connection": "close"}), (200_000, 60, {})]
)
async def test_connection_with_unread_answer_is_closed(size: int, num_requests: int, headers: dict[str, str]) -> None:
    """Nothing stays in memory for a client that does not read."""
    requested = asyncio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        requested.set()
        await Response(b"x" * size, headers=headers)(scope, receive, send)

    async with listener(large, write_timeout_s=0.1) as opened:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", opened.http.port))
            await loop.sock_sendall(client, ASK * num_requests)
            await requested.wait()
            while opened.http.num_connections:  # noqa: ASYNC110  # uvicorn tells nobody
                await asyncio.sleep(0.01)


async def test_connection_pipelining_beyond_bound_is_cut_off() -> None:
    async with listener() as opened:
        client = await opened.connect()
        client.writer.write(ASK * 60)
        for _ in range(60):
            await client.reader.readuntil(b"hello")
        client.writer.write(ASK * 1000)
        answered = (await client.reader.read()).count(b"hello")
        assert answered < 1000
        # What it may still send is read on until it ends itself, too.
        client.writer.close()
        while opened.http.num_connections:  # noqa: ASYNC110  # uvicorn tells nobody
            await asyncio.sleep(0.01)


class ResetTransport(asyncio.Transport):
    """Has lost its socket, like that of a TLS client that has reset its connection, and has not said so yet."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def close(self) -> None:
        self.closed.set()

    abort = close


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def test_connection_without_socket_leaves_the_others_their_timeouts() -> None:
    limits = ConnectionLimits(most=100, head_timeout_s=0.1, keep_alive_s=LONG_S, write_timeout_s=LONG_S)
    watch = ConnectionWatch(ConnectionTable(limits), asyncio.get_running_loop())
    config = uvicorn.Config(never, lifespan="off", log_config=None)
    config.load()
    silent, reset = ResetTransport(), ResetTransport()
    for transport, sent in ((reset, ASK * 2), (silent, b"GET")):
        connection = Connection(watch, config=config, server_state=ServerState(), app_state={})
        connection.connection_made(transport)
        connection.data_received(sent)
    async with asyncio.timeout(WAIT_S):
        await reset.closed.wait()
        await silent.closed.wait()
    watch.stop()


async def test_connection_without_socket_closes_when_asked_to() -> None:
    limits = ConnectionLimits(most=100, head_timeout_s=LONG_S, keep_alive_s=LONG_S, write_timeout_s=LONG_S)
    watch = ConnectionWatch(ConnectionTable(limits), asyncio.get_running_loop())
    config = uvicorn.Config(never, lifespan="off", log_config=None)
    config.load()
    for close in (Connection.leave_if_idle, Connection.close_behind_answer):
        transport = ResetTransport()
        connection = Connection(watch, config=config, server_state=ServerState(), app_state={})
        connection.connection_made(transport)
        close(connection)
        assert transport.is_closing()
    watch.stop()


def test_uvicorn_does_what_was_copied_from_it() -> None:
    """`Connection` and its links do by themselves what these methods do. Where this fails: compare the two, then change
    the digest."""
    copied = ("data_received", "on_url", "on_header", "on_response_complete")
    sources = "".join(inspect.getsource(getattr(HttpToolsProtocol, name)) for name in copied)
    sources += inspect.getsource(RequestResponseCycle.send)
    assert hashlib.sha256(sources.encode()).hexdigest()[:16] == "61ecef5d77ca74c3"
