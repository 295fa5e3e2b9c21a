"""A client that reads streams as cheaply as it can: its own work must not look like a pause of the cluster."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson


@dataclass(slots=True)
class Answer:
    """One streamed answer as it came."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    problem: str | None = None
    came_s: dict[int, list[float]] = field(default_factory=dict)
    """When each event of a choice came, on the monotonic clock; the first is when the request was sent."""

    def same_as(self, other: "Answer") -> bool:
        """Text, tokens, ends and usage, which must be there and right."""
        if self.usage is None or other.usage is None or not (self.is_counted and other.is_counted):
            return False
        mine = (self.texts, self.token_ids, self.finishes, self.usage["prompt_tokens"])
        return mine == (other.texts, other.token_ids, other.finishes, other.usage["prompt_tokens"])

    @property
    def is_counted(self) -> bool:
        """Whether usage was received, and equals the number of tokens that came."""
        if (usage := self.usage) is None:
            return False
        num_tokens = sum(len(ids) for ids in self.token_ids.values())
        return (usage["completion_tokens"], usage["total_tokens"]) == (num_tokens, usage["prompt_tokens"] + num_tokens)


async def ask(base_url: str, body: Mapping[str, Any]) -> Answer:
    """Read one completion, streamed with usage. `problem` says what was wrong with it."""
    answer, sent_s = Answer(), time.monotonic()
    request = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with _posted(base_url, orjson.dumps(request)) as lines:
            async for line in lines:
                if line == b"data: [DONE]":
                    return answer
                if line.startswith(b"data: "):
                    _take(answer, orjson.loads(line[6:]), sent_s)
    except (OSError, EOFError, ValueError) as broken:
        answer.problem = answer.problem or f"{type(broken).__name__}: {broken}"
    answer.problem = answer.problem or "the stream broke off"
    return answer


def _take(answer: Answer, chunk: dict[str, Any], sent_s: float) -> None:
    if "error" in chunk:
        answer.problem = str(chunk["error"])
        return
    now_s = time.monotonic()
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        index = choice["index"]
        answer.came_s.setdefault(index, [sent_s]).append(now_s)
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        answer.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
        if choice["finish_reason"]:
            answer.finishes[index] = choice["finish_reason"]


@asynccontextmanager
async def _posted(base_url: str, content: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """Lines of the body. Raises ValueError for any status but 200."""
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 22)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status.decode().strip()}: {(await reader.read())[-300:]!r}")
        while (await reader.readline()).strip():
            pass
        yield _lines(reader)
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a chunked body (RFC 9112, section 7.1)."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        data = rest + (await reader.readexactly(size + 2))[:-2]
        *whole, rest = data.split(b"\n")
        for line in whole:
            yield line
