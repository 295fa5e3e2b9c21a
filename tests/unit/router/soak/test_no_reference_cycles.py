"""A request that has ended leaves nothing that only a collection of cycles would find.

With thousands of such objects a collection holds the whole router up for tens of milliseconds, about once a second
while many are turned away.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from router.http.app import create_app
from router.http.server.http_server import HttpServer
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import cluster, collect, routed
from tests.support.router.servers import fakes

OWNED = ("router", "tandem", "uvicorn")
NUM_REQUESTS = 5
WAIT_S = 20.0


@contextmanager
def collecting() -> Iterator[Counter[str]]:
    """Types of our objects that were in cycles, once left."""
    found: Counter[str] = Counter()
    gc.freeze()  # what was made before is not looked through: it is most of what there is
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(one).__qualname__ for one in gc.garbage if type(one).__module__.partition(".")[0] in OWNED)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@asynccontextmanager
async def connected(listener: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("body", [b'{"prompt": "a", "stream": true}', b'{"prompt": "a"}', b'{"prompt": "a", "n": 0}'])
async def test_answers_and_refusals_leave_no_cycles(body: bytes) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.say("hello world")
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    async with HttpServer(app, host="127.0.0.1", port=0) as listener, asyncio.timeout(WAIT_S):
        with collecting() as found:
            for _ in range(NUM_REQUESTS):
                async with connected(listener) as (reader, writer):
                    writer.write(head + body)
                    assert await reader.read()
    assert not found


async def test_departed_clients_leave_no_cycles() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.say("hello world", hang_after=1)
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with HttpServer(app, host="127.0.0.1", port=0) as listener, asyncio.timeout(WAIT_S):
        with collecting() as found:
            for _ in range(NUM_REQUESTS):
                async with connected(listener) as (reader, writer):
                    writer.write(head + body)
                    assert await reader.readuntil(b"data: ")
                    parts.generator.closed.clear()
                await parts.generator.closed.wait()
    assert "_DirectLink" not in found


async def test_dispatched_requests_leave_no_cycles() -> None:
    async with cluster(FakeWorker("d0")) as core, asyncio.timeout(WAIT_S):
        with collecting() as found:
            for number in range(NUM_REQUESTS):
                assert await collect(core.generate(routed(request_id=f"r{number}", n=2)))
    assert not found
