"""`python -m tandem_bench.scale.streams ...`: a client of many streams at a time, which checks every answer.

As many streams as `--streams` are kept alive, each over a connection of its own; one that has ended is followed by
another. A stream is live while its tokens come. On SIGTERM no more begin, and the process ends with the last one. Each
second a line of JSON tells what there has been.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from router.http.server.connection_limits import raise_file_limit
from tandem_bench.router.overload import quantile

LIVE_S = 5.0
"""A stream whose last token is older is not live."""
HUNG_S = 60.0
"""Silence after which a stream counts as hung."""
SHARES = {"p50": 0.5, "p99": 0.99, "greatest": 1.0}
_PROMPT_TOKENS = 32
_PROMPT_IDS = range(300, 1000)
_LOOK_S = 1.0
_STARTS_PER_S = 200.0
"""How fast streams are begun, so that the first of them do not come all at once."""


class Stream(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, wanted: str, on_end: Callable[["Stream", str], None]) -> None:
        """`on_end`: is told how the stream ended, once."""
        self._request = request
        self._wanted = wanted
        self._on_end: Callable[[Stream, str], None] | None = on_end
        self._transport: asyncio.Transport | None = None
        self._status = 0
        self._unread = b""
        self._texts: list[str] = []
        self.num_tokens = 0
        self.first_wait_s = 0.0
        """From its begin to its first token."""
        self.last_s = time.monotonic()
        """When its last token came, or it began."""
        self.longest_pause_s = 0.0
        """Between two tokens."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # narrows: it is a connection
        if self._on_end is None:
            transport.abort()
            return
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._status:
            head, found, rest = self._unread.partition(b"\r\n\r\n")
            if not found:
                return
            self._status, self._unread = int(head.split(None, 2)[1]), rest
        if self._status == 200:
            *events, self._unread = self._unread.split(b"\n\n")
            for event in events:
                self._read(event.rpartition(b"data: ")[2])

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.end("whole" if "".join(self._texts) == self._wanted else "wrong text")
            return
        event: dict[str, Any] = json.loads(data)
        if (error := event.get("error")) is not None:
            self.end(f"told: {error.get('code') or error.get('type')}")
        elif text := event["choices"][0]["text"]:
            now_s = time.monotonic()
            if self.num_tokens:
                self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_s)
            else:
                self.first_wait_s = now_s - self.last_s
            self.num_tokens, self.last_s = self.num_tokens + 1, now_s
            self._texts.append(text)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._status in (0, 200):
            self.end("broken off without a reason")
        else:
            self.end(f"refused: {self._status}")

    def end(self, how: str) -> None:
        """End for this reason, unless it has ended."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            if self._transport is not None:
                self._transport.abort()
            on_end(self, how)


class StreamLoad:
    """Keeps a number of streams alive."""

    def __init__(self, port: int, texts: Sequence[str], *, num_tokens: range, rng: Random) -> None:
        """`texts`: of the tokens that every answer repeats; `num_tokens`: of an answer, chosen at random."""
        self._port = port
        self._texts = texts
        self._num_tokens = num_tokens
        self._rng = rng
        self._live: set[Stream] = set()
        self._pauses_s: list[float] = []
        self._first_waits_s: list[float] = []
        self._num_begun = 0
        self.ended: Counter[str] = Counter()
        self.is_over = False
        """Whether no more streams are to begin."""

    async def keep(self) -> None:
        """Have one stream after the other, until it is over."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            ended: asyncio.Future[None] = loop.create_future()
            stream = self._make(ended)
            self._live.add(stream)
            self._num_begun += 1
            try:
                await loop.create_connection(partial(_same, stream), "127.0.0.1", self._port)
            except OSError as error:
                stream.end(f"no connection: {error.strerror}")
            await ended
            if not stream.num_tokens:
                await asyncio.sleep(_LOOK_S)

    def _make(self, ended: "asyncio.Future[None]") -> Stream:
        num_tokens = self._rng.choice(self._num_tokens)
        prompt = [self._rng.choice(_PROMPT_IDS) for _ in range(_PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = f"Host: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        wanted = "".join(self._texts[n % len(self._texts)] for n in range(num_tokens))

        def on_end(stream: Stream, how: str) -> None:
            self.ended[how] += 1
            self._live.discard(stream)
            if stream.num_tokens:
                self._first_waits_s.append(stream.first_wait_s)
            if stream.num_tokens > 1:
                self._pauses_s.append(stream.longest_pause_s)
            ended.set_result(None)

        return Stream(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + content, wanted, on_end)

    async def watch(self) -> None:
        """End streams that hang, and tell how things stand, each second."""
        while True:
            now_s = time.monotonic()
            for stream in [one for one in self._live if now_s - one.last_s > HUNG_S]:
                stream.end("hung")
            self.tell()
            await asyncio.sleep(_LOOK_S)

    def tell(self) -> None:
        since_s = time.monotonic() - LIVE_S
        told = {
            "live": sum(stream.num_tokens > 0 and stream.last_s > since_s for stream in self._live),
            "begun": self._num_begun,
            "ended": self.ended,
            "pauses_s": _quantiles(self._pauses_s),
            "first_waits_s": _quantiles(self._first_waits_s),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: quantile(values, share) for name, share in SHARES.items()} if values else {}


def _same(stream: Stream) -> Stream:
    return stream


async def _run(options: argparse.Namespace) -> None:
    num_tokens = range(options.tokens // 2, options.tokens * 3 // 2)
    load = StreamLoad(options.port, json.loads(options.texts), num_tokens=num_tokens, rng=Random(options.seed))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, load, "is_over", True)
    watching = asyncio.create_task(load.watch())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(options.streams):
            tasks.create_task(load.keep())
            await asyncio.sleep(1 / _STARTS_PER_S)
    watching.cancel()
    load.tell()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.scale.streams", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of an answer on average")
    parser.add_argument("--texts", required=True, help="JSON: the texts that every answer repeats")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    raise_file_limit()
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
