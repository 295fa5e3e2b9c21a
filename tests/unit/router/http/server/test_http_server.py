"""The HTTP server over real sockets: the official client, disconnects, hostile bytes."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from router.http.app import create_app
from router.http.body import json_body
from router.http.body.sse import EventStream, SseResponse
from router.http.server.http_server import HttpServer
from router.text.tokenizer import Tokenizer
from tests.support.router.servers import fakes

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
WAIT_S = 20.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer)


@pytest.fixture
async def listener(parts: fakes.Servers) -> AsyncIterator[HttpServer]:
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as listener:
        yield listener


@pytest.fixture
async def client(listener: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{listener.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def raw(listener: HttpServer, *parts: bytes) -> bytes:
    """The server's answer to these bytes before it closes or falls silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(WAIT_S):
            return await reader.read(65536)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_official_client_chat(client: openai.AsyncOpenAI, parts: fakes.Servers) -> None:
    ids = parts.say("hello wörld 😀 漢字")
    stream = await client.chat.completions.create(
        model=fakes.MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": False},
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "hello wörld 😀 漢字"
    assert usage is not None
    assert usage.completion_tokens == len(ids)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 7
    whole = await client.chat.completions.create(model=fakes.MODEL, messages=[{"role": "user", "content": "hello"}])
    assert whole.choices[0].message.content == text


async def test_official_client_completions(client: openai.AsyncOpenAI, parts: fakes.Servers) -> None:
    parts.say("hello world")
    stream = await client.completions.create(model=fakes.MODEL, prompt=["a", "b"], stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["hello world"] * 2
    assert [model.id async for model in client.models.list()] == [fakes.MODEL]
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=fakes.MODEL, prompt="a", suffix="b")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_leaving_client_cancels(
    listener: HttpServer, parts: fakes.Servers, stream: bool, hang_after: int
) -> None:
    parts.say("hello world", hang_after=hang_after)
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": %s}' % (b"true" if stream else b"false")
    _reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    async with asyncio.timeout(WAIT_S):
        await parts.generator.began.wait()
        writer.close()
        await parts.generator.closed.wait()
    assert parts.generator.open_streams == 0


async def test_endless_body_is_refused_early(listener: HttpServer) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = await raw(listener, CHAT + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 17)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (431, [b"GET /health HTTP/1.1\r\n", *[b"X-A: " + b"x" * 4096 + b"\r\n"] * 64]),
        (431, [b"GET /health HTTP/1.1\r\nX-Request-Id: " + b"x" * (1 << 20) + b"\r\n\r\n"]),
        (414, [b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"]),
        (400, [b"\x16\x03\x01\x02\x00\x01\x00"]),
        (400, [b"GET /health HTTP/1.1\r\nX-Request-Id: a\r\nBad Header\r\n\r\n"]),
    ],
)
async def test_hostile_head_is_cut_off(listener: HttpServer, head: list[bytes], status: int) -> None:
    answer = await raw(listener, *head)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{listener.port}/health")).status_code == 200


async def test_sse_client_not_reading_is_disconnected() -> None:
    closed = asyncio.Event()

    async def endless(stream: EventStream) -> None:
        try:
            while True:
                stream.write(b"x" * (1 << 20))
                await stream.ready()
        finally:
            closed.set()

    async def app(scope, receive, send) -> None:
        await SseResponse(endless, write_timeout_s=0.05)(scope, receive, send)

    async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as listener:
        _reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
        writer.transport.abort()


async def test_http_server_on_port_in_use_raises(listener: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        async with HttpServer(None, host="127.0.0.1", port=listener.port):
            pass


async def test_stalled_body_times_out(listener: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "BODY_TIMEOUT_S", 0.05)
    answer = await raw(listener, CHAT + b"Content-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()


async def test_http_server_close_lets_running_streams_end(parts: fakes.Servers) -> None:
    parts.say("hello world")
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with HttpServer(app, host="127.0.0.1", port=0, grace_s=5.0) as listener:
            url = f"http://127.0.0.1:{listener.port}/v1/completions"
            answer = asyncio.create_task(client.post(url, json={"prompt": "a"}))
            await parts.generator.began.wait()
        assert (await answer).json()["choices"][0]["text"] == "hello world"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", listener.port)) != 0


async def test_pipelining_client_leaving_cancels() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def run(events: EventStream) -> None:
        began.set()
        try:
            while True:
                if events.write(b"data: x\n\n"):
                    await events.ready()
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with HttpServer(SseResponse(run), host="127.0.0.1", port=0, grace_s=1.0) as listener, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        await began.wait()
        await reader.read(10)
        writer.close()
        await ended.wait()


@pytest.mark.parametrize(
    "ahead", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", CHAT + b"Content-Length: 300000\r\n\r\n"]
)
async def test_client_leaving_unstreamed_answer_cancels(
    listener: HttpServer, parts: fakes.Servers, ahead: bytes
) -> None:
    """Nothing is written meanwhile, and nothing is read behind the next request."""
    parts.say("hello world", hang_after=0)
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    _reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(WAIT_S):
        await parts.generator.began.wait()
        writer.write(ahead)
        if b"POST" in ahead:
            writer.write(b"x" * 200_000)
        await writer.drain()
        writer.close()
        await parts.generator.closed.wait()
    assert parts.generator.open_streams == 0
