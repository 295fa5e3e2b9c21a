"""What counts as an answer under overload."""

import asyncio
from random import Random

import pytest

from tandem_bench.router.overload import send_request

_TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "is_whole"),
    [
        (_TOKEN * 16 + b"data: [DONE]\n\n", True),
        (_TOKEN * 3, False),
        (_TOKEN * 3 + b'data: {"error": {"message": "the worker was lost"}}\n\ndata: [DONE]\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b"", False),
    ],
    ids=["whole", "cut", "error", "no_text", "nothing"],
)
async def test_only_whole_streams_are_good_answers(stream: bytes, is_whole: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + stream)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        answered = await send_request(server.sockets[0].getsockname()[1], "modest-0", Random(1))
    assert answered.status == 200
    assert answered.is_whole is answered.is_good is is_whole
