"""A router with an HTTP server over fake workers, whose natively written tokens are counted."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from router.access.tls import ServerTlsState
from router.fleet.native_streams import MOST_TOKENS, NativeStreams, StreamRoom, native_streams
from router.http.app import create_app
from router.http.server.http_server import HttpServer
from router.types.session_events import StreamOffer
from tests.support.compiler import WITHOUT_COMPILER, has_compiler
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import Cluster, cluster
from tests.support.router.servers import fakes

WAIT_S = 120.0


def make_native_streams(most: int) -> Callable[[], NativeStreams]:
    """As `native_streams`; skips the test where there is no compiler, and fails it where the sources do not compile."""
    found = native_streams(StreamRoom(most))
    if found is None and not has_compiler():
        pytest.skip(WITHOUT_COMPILER)
    assert found is not None, "native code does not compile here"
    return found


class CountedStreams(NativeStreams):
    """Counts the tokens that were written natively, and those that Python had to finish."""

    num_written = num_rests = 0

    def open(self, handle: int, offer: StreamOffer) -> None:
        def on_written(token_ids: Sequence[int], gaps_s: Sequence[float]) -> None:
            CountedStreams.num_written += len(token_ids)
            assert len(gaps_s) == len(token_ids) <= MOST_TOKENS
            assert min(gaps_s) >= 0.0
            offer.on_written(token_ids, gaps_s)

        def write_rest(rest: bytes) -> None:
            CountedStreams.num_rests += 1
            offer.write_rest(rest)

        super().open(handle, replace(offer, on_written=on_written, write_rest=write_rest))


@dataclass
class World:
    """What a test looks at."""

    core: Cluster
    parts: fakes.Servers
    http: HttpServer
    address: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.address = ("127.0.0.1", self.http.port)

    async def answer(self, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
        """Return the events of a stream, without what differs between two runs."""
        url = f"http://127.0.0.1:{self.http.port}{path}"
        async with (
            httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client,
            client.stream("POST", url, json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            return events_of((await response.aread()).decode())


def events_of(answer: str) -> list[Any]:
    """The events of a whole stream, without what differs between two runs."""
    *lines, last = answer.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    events = [json.loads(line[line.index("data: ") :].removeprefix("data: ")) for line in lines]
    return [{key: one[key] for key in one if key not in ("id", "created")} for one in events]


def text_of(events: list[Any]) -> str:
    """The text of a completion."""
    return "".join(choice["text"] for one in events for choice in one.get("choices", ()))


@asynccontextmanager
async def world(
    *workers: FakeWorker,
    new: Callable[[], NativeStreams] | None,
    tls: ServerTlsState | None = None,
    parts: fakes.Servers | None = None,
) -> AsyncIterator[World]:
    """Start the workers, a router over them and its HTTP server."""
    parts = parts or fakes.make_servers(fakes.make_tokenizer(), clock=time.monotonic)
    async with asyncio.timeout(WAIT_S), cluster(*workers, new_native_streams=new) as core:
        app = create_app(parts.frontend, core.dispatcher, parts.ready, parts.config, parts.metrics)
        async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0, tls=tls) as http:
            yield World(core, parts, http)
