"""Endless heads, ambiguous requests, and half-closed connections, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.body.errors import error_response
from router.http.server import connection
from router.http.server.connection_limits import ConnectionLimits
from router.http.server.http_server import HttpServer
from tandem.errors import RequestTooLarge

WAIT_S = 30.0
LONG_S = 600.0
ASK = b"GET / HTTP/1.1\r\nHost: r\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"x" * (64 << 10)
MOST_TAKEN = 64 << 20
"""What a client got rid of includes what both kernels hold; without a bound there would be no end."""


async def show_headers(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers the body's size and the headers after reading all."""
    request = Request(scope, receive)
    size = len(await request.body())
    names = sorted(name.decode() for name, _ in scope["headers"])
    await JSONResponse({"size": size, "headers": names})(scope, receive, send)


async def too_large(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has read any of the body."""
    await error_response(RequestTooLarge("the body is larger than that"))(scope, receive, send)


@asynccontextmanager
async def listening(app: ASGIApp = show_headers, *, head_timeout_s: float = LONG_S) -> AsyncIterator[HttpServer]:
    limits = ConnectionLimits(most=100, head_timeout_s=head_timeout_s, keep_alive_s=LONG_S, write_timeout_s=LONG_S)
    async with (
        HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0, limits=limits) as listener,
        asyncio.timeout(WAIT_S),
    ):
        yield listener


async def answer_to(listener: HttpServer, sent: bytes) -> bytes:
    """All answers until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


def poured(port: int, begin: bytes, pieces: Iterator[bytes]) -> tuple[bytes, int]:
    """The answer to a client that reads only when it can send no more or has sent all; and what it sent."""
    num_sent = 0
    with closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) as client:
        client.sendall(begin)
        try:
            for piece in pieces:
                client.sendall(piece)
                num_sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = bytearray()
        try:
            while part := client.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
    return bytes(answer), num_sent


async def ended(listener: HttpServer) -> None:
    """Wait until every connection has closed."""
    while listener.num_connections:  # noqa: ASYNC110  # uvicorn tells nobody
        await asyncio.sleep(0.01)


def endlessly() -> Iterator[bytes]:
    while True:
        yield PIECE


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / HTTP/1.1\r\nHost: r\r\nX-A: ",
        b"GET / HTTP/1.1\r\nHost: r\r\nX-",
        CHUNKED + b"1\r\na\r\n0\r\nX-A: ",
        CHUNKED + b"1;",
    ],
    ids=["value", "name", "trailer", "extension"],
)
async def test_head_beyond_bound_is_431(begin: bytes) -> None:
    async with listening() as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        answering = asyncio.create_task(reader.readuntil(b"}}"))
        writer.write(begin)
        num_sent = 0
        while not answering.done():
            writer.write(PIECE)
            num_sent += len(PIECE)
            await asyncio.wait({answering}, timeout=0.02)
        answer = await answering
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code":"head_too_large"' in answer
        assert num_sent <= 2 << 20
        writer.close()
        _, num_taken = await asyncio.to_thread(poured, listener.port, begin, endlessly())
        assert num_taken <= MOST_TAKEN
        assert b'"size":1' in await answer_to(
            listener, CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + b"1\r\na\r\n0\r\n\r\n"
        )


async def test_target_beyond_bound_is_refused() -> None:
    async with listening() as listener:
        assert (await answer_to(listener, b"GET /" + b"x" * 20_000)).startswith(b"HTTP/1.1 414 ")


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding"),
        (b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", b"Transfer"),
        (b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b""),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding"),
        (b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n", b""),
        (b"GET / HTTP/1.1\r\n", b"Host"),
        (b"GET / HTTP/1.1\r\nHost: r\r\nHost: r\r\n", b"Host"),
        (b"GET / HTTP/1.1\r\nHost: r\r\nX-A: b\r\nhOST: s\r\n", b"Host"),
        (b"GET / HTTP/1.0\r\nHost: r\r\nHost: s\r\n", b"Host"),
        (b"GET / HTTP/1.1\r\nHost: r, s\r\n", b"Host"),
        (b"GET / HTTP/1.1\r\nHost: r/metrics\r\n", b"Host"),
    ],
)
async def test_ambiguous_head_is_refused(head: bytes, named: bytes) -> None:
    async with listening() as listener:
        answer = await answer_to(listener, head + b"\r\n1\r\na\r\n0\r\n\r\n" + ASK)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert named in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "what is behind it is nobody's request"


async def test_connection_malformed_requests_are_logged_with_rate_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening() as listener:
        for _ in range(20):
            assert (await answer_to(listener, b"x\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert len(caplog.records) == 1
        monkeypatch.setattr(connection, "_WARN_EVERY_S", 0.0)
        await answer_to(listener, b"x\r\n\r\n")
    assert len(caplog.records) == 2
    assert "; 19 more were refused" in caplog.text


async def test_connection_unsupported_upgrade_is_answered_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offer = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    async with listening() as listener:
        assert (await answer_to(listener, ASK.removesuffix(b"\r\n") + offer)).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"


async def answers_to_pieces(listener: HttpServer, *pieces: bytes) -> bytes:
    """All answers to a request that arrives in as many reads, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("num_split", [0, 10, len(LAST)])
async def test_connection_request_behind_an_offered_upgrade_is_answered(num_split: int) -> None:
    first = ASK.removesuffix(b"\r\n") + OFFER + b"\r\n"
    async with listening() as listener:
        answer = await answers_to_pieces(listener, first + first + LAST[:num_split], LAST[num_split:])
    assert answer.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("num_split", [0, 8, 14])
@pytest.mark.parametrize(
    ("framing", "body", "size"),
    [
        (b"Content-Length: 14\r\n", b"GET / HTTP/1.1", 14),
        (b"Content-Length: 0\r\n", b"", 0),
        (b"Transfer-Encoding: chunked\r\n", b"e\r\nGET / HTTP/1.1\r\n0\r\n\r\n", 14),
    ],
)
async def test_connection_body_of_a_request_that_offers_an_upgrade_is_read(
    framing: bytes, body: bytes, size: int, num_split: int
) -> None:
    """So Java's client sends its first request; and no proxy may take part of a body for a request."""
    first = b"POST / HTTP/1.1\r\nHost: r\r\n" + OFFER + framing + b"\r\n"
    async with listening() as listener:
        answer = await answers_to_pieces(listener, first + body[:num_split], body[num_split:] + LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b'{"size":%d,' % size in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n",
        b"GET / HTTP/1.0\r\nHost: r\r\n",
        b"GET / HTTP/1.1\r\nHost:\r\nConnection: close\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n",
        b"GET / HTTP/1.1\r\nHost: llm_1.example.com:8000 \r\nConnection: close\r\n",
    ],
)
async def test_valid_host_or_http_1_0_is_answered(head: bytes) -> None:
    async with listening() as listener:
        assert (await answer_to(listener, head + b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_trailers_of_chunked_body_are_ignored() -> None:
    async with listening() as listener:
        sent = CHUNKED.replace(b"chunked", b"Chunked\r\nConnection: close")
        answer = await answer_to(listener, sent + b"1\r\na\r\n0\r\nAuthorization: Bearer key\r\nX-A: b\r\n\r\n")
    assert answer.endswith(b'{"size":1,"headers":["connection","host","transfer-encoding"]}')


async def test_malformed_request_after_stream_does_not_disturb_it() -> None:
    began = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(stream) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(ASK)
        await began.wait()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"5\r\nhello\r\n")


@pytest.mark.parametrize("length", [b"Content-Length: %d" % (32 << 20), b"Transfer-Encoding: chunked"])
async def test_refusal_reaches_client_still_sending(length: bytes) -> None:
    async with listening(too_large) as listener:
        begin = b"POST / HTTP/1.1\r\nHost: r\r\n" + length + b"\r\n\r\n"
        chunk = PIECE if length.startswith(b"Content") else b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
        answer, num_sent = await asyncio.to_thread(poured, listener.port, begin, iter([chunk] * 512))
    assert num_sent == 512 * len(chunk), "a reset, which takes the answer from many a client"
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert b'"code":"request_too_large"' in answer


async def test_connection_after_refusal_reads_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_BEHIND_BODY", 1 << 20)
    async with listening(too_large) as listener:
        _, num_taken = await asyncio.to_thread(poured, listener.port, CHUNKED + b"ffffffffff\r\n", endlessly())
        assert num_taken <= MOST_TAKEN
        await ended(listener)


async def test_connection_after_refusal_reads_bounded_time() -> None:
    async with listening(too_large, head_timeout_s=0.1) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        # Neither the rest nor an end comes.
        await ended(listener)
        writer.close()


async def test_aborted_answer_closes_connection_of_sending_client() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async with listening(broken, head_timeout_s=0.1) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        await ended(listener)
        writer.close()


async def test_requests_after_connection_close_get_no_answer() -> None:
    num_requests = 0

    async def last(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_requests
        num_requests += 1
        await Response("hello", headers={"Connection": "close"})(scope, receive, send)

    async with listening(last) as listener:
        answer = await answer_to(listener, ASK * 3)
    assert answer.count(b"HTTP/1.1 200 ") == num_requests == 1
