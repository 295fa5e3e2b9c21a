"""A listener on a real socket that answers like the router's chat route, with canned streams."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


def event(value: object) -> bytes:
    """Return one server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def answer_events(text: str, thought: str = "") -> list[bytes]:
    """A whole answer, a piece per character, with usage and the time line; `thought`: before it, in one piece."""
    chunks = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})]
    chunks += [event({"choices": [{"index": 0, "delta": {"reasoning_content": thought}}]})] if thought else []
    chunks += [event({"choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in text]
    chunks.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    usage = {"prompt_tokens": 40, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 32}}
    timing = {"queue_s": 0.002, "prefill_s": 0.02, "transfer_s": 0.003, "decode_s": 0.04}
    chunks.append(event({"choices": [], "usage": usage, "timing": timing}))
    return [*chunks, event("[DONE]")]


def completion_events(text: str) -> list[bytes]:
    """The same of a plain prompt."""
    chunks = [event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]}) for piece in text]
    chunks.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    return [*chunks, event("[DONE]")]


@dataclass
class FakeRouter:
    """Answers every chat request with what `reply` makes of its body."""

    reply: Callable[[dict], list[bytes]]
    status: str = "200 OK"
    hang: bool = False
    url: str = ""
    card: dict = field(default_factory=dict)
    """What `/v1/models` says beside the model's name."""
    adapters: tuple[str, ...] = ()
    """Names that it lists beside the model's."""
    paths: list[str] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)
    timing_asked: list[bool] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get /v1/models"):
                names = ("fake-model", *self.adapters)
                body = json.dumps({"data": [{"id": name, **self.card} for name in names]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
                return
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.paths.append(head.split()[1])
            self.requests.append(body)
            self.timing_asked.append("x-tandem-timing: 1" in head)
            writer.write(f"HTTP/1.1 {self.status}\r\nRetry-After: 3\r\nConnection: close\r\n\r\n".encode())
            for chunk in self.reply(body):
                writer.write(chunk)
            await writer.drain()
            if self.hang:
                await reader.read()
                self.hung_up.set()
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def fake_router(reply: Callable[[dict], list[bytes]], **settings) -> AsyncIterator[FakeRouter]:
    """Listen on a free port while the block runs."""
    router = FakeRouter(reply, **settings)
    server = await asyncio.start_server(router.handle, "127.0.0.1", 0)
    router.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield router
