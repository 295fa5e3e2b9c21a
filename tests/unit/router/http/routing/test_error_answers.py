"""An error becomes an answer before its start, and cuts it off afterwards."""

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.http.body.client_link import ClientLeft
from router.http.routing.error_answers import ErrorAnswers
from router.http.server.http_server import HttpServer
from tandem.errors import InternalError, Overloaded

ERRORS = [Overloaded("full"), InternalError("a bug"), RuntimeError("another bug"), ClientLeft("the client left")]
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
WAIT_S = 20.0


def application(error: Exception, *before: Message) -> ErrorAnswers:
    """Fails after these messages."""

    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in before:
            await send(message)
        raise error

    return ErrorAnswers(fail)


async def answer(app: ErrorAnswers) -> bytes:
    """All bytes received over a socket, to the end of the connection."""
    async with asyncio.timeout(WAIT_S), HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = await reader.read()
        writer.close()
    return found


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_error_before_response_head_becomes_answer(error: Exception) -> None:
    found = await answer(application(error))
    assert found.startswith(b"HTTP/1.1 ")
    assert b'{"error"' in found


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_error_after_response_head_cuts_connection(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body: Message = {"type": "http.response.body", "body": b"abc", "more_body": True}
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with caplog.at_level(logging.DEBUG):
        await application(error, START, body)(scope, None, send)  # type: ignore[arg-type]
    assert sent == [START, body]
    # Clients leave at all times; all else is somebody's fault.
    record = next(one for one in caplog.records if "cut off" in one.getMessage())
    assert (record.levelno > logging.DEBUG) == (not isinstance(error, ClientLeft))
    found = await answer(application(error, START, body))
    assert found.count(b"HTTP/1.1") == 1
    assert found.endswith(b"\r\n\r\nabc")
