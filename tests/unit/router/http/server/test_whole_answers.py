"""Answers that are sent as a whole, over real sockets: the same bytes as in two messages, whatever was asked."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.access.audit_log import NO_AUDIT
from router.http.body.client_link import WHOLE_ANSWER
from router.http.openai import whole_answer
from router.http.openai.whole_answer import WholeResponse
from router.http.server.connection_limits import ConnectionLimits
from router.http.server.http_server import HttpServer
from router.http.server.middleware import RequestMiddleware
from router.metrics.router_metrics import RouterMetrics

WAIT_S = 20.0
LONG_S = 600.0
BODY = b'{"a":"whole"}'
GET = b"GET /a HTTP/1.1\r\nHost: r\r\nX-Request-Id: mine\r\n\r\n"
LAST = b"GET /a HTTP/1.1\r\nHost: r\r\nX-Request-Id: mine\r\nConnection: close\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: r\r\nX-Request-Id: mine\r\n"


class Answering:
    """Answers every request with BODY, the body of which it has read if `reads`."""

    def __init__(self, *, has_link: bool = True, reads: bool = False, body: bytes = BODY) -> None:
        self.metrics = RouterMetrics("m")
        self.body = body
        self.left = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.began = asyncio.Event()
        self._has_link = has_link
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_link:
            scope["extensions"] = {}
        while self._reads and (await receive())["more_body"]:
            pass
        self.began.set()
        await self.go.wait()
        await WholeResponse(self.body, {"Server-Timing": "a;dur=1"})(scope, receive, send)
        # Nothing else comes once the answer is complete.
        assert (await receive())["type"] == "http.disconnect"
        self.left.set()


@asynccontextmanager
async def listener(app: Answering, *, write_timeout_s: float = LONG_S) -> AsyncIterator[HttpServer]:
    limits = ConnectionLimits(most=9, head_timeout_s=LONG_S, keep_alive_s=LONG_S, write_timeout_s=write_timeout_s)
    whole = RequestMiddleware(app, app.metrics, NO_AUDIT)
    async with HttpServer(whole, host="127.0.0.1", port=0, grace_s=1.0, limits=limits) as http, asyncio.timeout(WAIT_S):
        yield http


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the messages that uvicorn itself sends."""
    messages, send = list[str](), RequestResponseCycle.send

    async def noted(self: RequestResponseCycle, message: Message) -> None:
        messages.append(message["type"])
        await send(self, message)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestResponseCycle, "send", noted)
    return messages


async def exchange(app: Answering, *parts: bytes) -> bytes:
    """All that the server answers, which closes the connection in the end, with the date left out."""
    async with listener(app) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return re.sub(rb"\r\ndate: [^\r]+", b"\r\ndate: now", answer)


@pytest.mark.parametrize(
    ("parts", "num_at_once", "num_others"),
    [
        pytest.param([GET, LAST], 1, 1, id="the last one closes the connection"),
        pytest.param([GET + GET + GET + LAST], 3, 1, id="pipelined"),
        pytest.param([GET, b"HEAD /a HTTP/1.1\r\nHost: r\r\n\r\n", GET, LAST], 2, 2, id="HEAD"),
        pytest.param([b"GET /a HTTP/1.0\r\nX-Request-Id: mine\r\n\r\n"], 0, 1, id="HTTP/1.0"),
        pytest.param([b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"], 0, 1, id="HTTP/1.0, keep-alive"),
        pytest.param([POST + b"Content-Length: 3\r\n\r\n", b"abc" + LAST], 1, 1, id="before its body"),
        pytest.param([POST + b"Content-Length: 3\r\n\r\na", b"bc", LAST], 1, 1, id="within its body"),
        pytest.param([POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", LAST], 1, 1, id="chunked"),
        pytest.param([POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", b"abc", LAST], 0, 2, id="continue"),
        pytest.param([GET, b"nonsense\r\n\r\n"], 1, 0, id="malformed behind it"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reads", [False, True])
async def test_whole_answer_is_same_bytes_at_once(
    sent: list[str], parts: list[bytes], num_at_once: int, num_others: int, reads: bool
) -> None:
    expected = await exchange(Answering(has_link=False, reads=reads), *parts)
    num_expected = len(sent) // 2
    sent.clear()
    app = Answering(reads=reads)
    # Each request with the same id, whether it brought one.
    ids = re.compile(rb"x-request-id: [0-9a-z]+")
    assert ids.sub(b"", await exchange(app, *parts)) == ids.sub(b"", expected)
    assert b"HTTP/1.1 200 OK\r\ndate: now\r\nserver-timing: a;dur=1\r\ncontent-length: 13\r\n" in expected
    assert BODY in expected
    assert len(sent) == 2 * num_others
    assert num_expected == num_at_once + num_others
    counts = app.metrics._http.values
    assert sum(counts.values()) == num_expected
    assert {status for _, _, status in counts} == {"200"}


async def test_whole_answer_has_request_id_and_is_complete_for_its_application(sent: list[str]) -> None:
    app = Answering()
    async with listener(app) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nx-request-id: mine\r\n" in head
        assert await reader.readexactly(len(BODY)) == BODY
        await app.left.wait()
        assert not sent
        writer.close()


async def test_whole_answer_of_client_that_left_is_dropped(sent: list[str]) -> None:
    app = Answering()
    app.go.clear()
    async with listener(app) as http:
        _reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(GET + GET)
        await app.began.wait()
        writer.close()
        while http.num_connections:  # noqa: ASYNC110  # uvicorn tells nobody
            await asyncio.sleep(0.01)
        app.go.set()
        await app.left.wait()
    assert sent == ["http.response.start", "http.response.body"]


async def test_whole_answer_while_server_stops_closes_connection() -> None:
    app = Answering()
    app.go.clear()
    async with listener(app) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(GET)
        await app.began.wait()
        stopping = asyncio.create_task(http.stop(5.0))
        await asyncio.sleep(0.2)
        app.go.set()
        answer = await reader.read()
        await stopping
        writer.close()
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(BODY)


async def test_whole_answers_wait_for_client_that_does_not_read() -> None:
    """What is pipelined is answered only as far as it is read; a client that never reads is disconnected."""
    body = b"x" * 200_000
    assert len(body) < whole_answer._PIECE_BYTES
    app = Answering(body=body)
    async with listener(app, write_timeout_s=0.2) as http:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", http.port))
            await loop.sock_sendall(client, GET * 60)
            await app.began.wait()
            while http.num_connections:  # noqa: ASYNC110  # uvicorn tells nobody
                await asyncio.sleep(0.01)
    counts = app.metrics._http.values
    assert sum(counts.values()) < 60


async def test_whole_answer_without_link_is_two_messages() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await WholeResponse(BODY)({"type": "http", "extensions": {}}, receive, send)
    assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
    assert WHOLE_ANSWER not in {message["type"] for message in messages}
