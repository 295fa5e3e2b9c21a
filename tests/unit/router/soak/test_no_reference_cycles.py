"""A request that has ended leaves nothing that only a collection of cycles would find.

With thousands of such objects a collection holds the whole router up for tens of milliseconds, about once a second
while many are turned away.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from router.dispatch.dispatcher import Dispatcher
from router.http.app import create_app
from router.http.server.http_server import HttpServer
from router.types.requests import RoutedRequest
from tandem.errors import Overloaded, Unavailable
from tests.support.fake_worker import FakeWorker, answer, hold
from tests.support.router.admission_queues import gated, of
from tests.support.router.cluster import cluster, collect, routed
from tests.support.router.kept_objects import collecting
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import HELLO
from tests.support.router.servers.tool_calls import CALLS, TOOLS

NUM_REQUESTS = 5
WAIT_S = 20.0


@asynccontextmanager
async def connected(listener: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader, status: int) -> bytes:
    """Read one answer, of this status, of a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(int(length[1])))


@pytest.mark.parametrize("said", ["hello world", CALLS])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "n": 0}),
        ("/v1/chat/completions", TOOLS),
        ("/v1/chat/completions", TOOLS | {"stream": True}),
        ("/v1/chat/completions", TOOLS | {"stream": True, "n": 2, "stop": ["world"]}),
        ("/v1/responses", {"input": "a", "stream": True}),
        ("/v1/messages", {"model": fakes.MODEL, "messages": HELLO["messages"], "max_tokens": 9, "stream": True}),
    ],
)
async def test_answers_and_refusals_leave_no_cycles(path: str, body: dict[str, Any], said: str) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), grammars=fakes.AnyGrammar(), context=4096)
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    status = 400 if body.get("n") == 0 else 200
    sent = json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(sent))
    # What asyncio's own connections leave in cycles is not looked at: there is one, and it stays.
    async with (
        HttpServer(app, host="127.0.0.1", port=0) as listener,
        asyncio.timeout(WAIT_S),
        connected(listener) as (reader, writer),
    ):
        parts.say(said)
        writer.write(head + sent)  # what is made once
        await read_answer(reader, status)
        with collecting() as found:
            for _ in range(NUM_REQUESTS):
                parts.say(said)
                writer.write(head + sent)
                assert await read_answer(reader, status)
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
    assert not [name for name in found if name.endswith("._DirectLink")]


async def test_dispatched_requests_leave_no_cycles() -> None:
    async with cluster(FakeWorker("d0")) as core, asyncio.timeout(WAIT_S):
        with collecting() as found:
            for number in range(NUM_REQUESTS):
                assert await collect(core.generate(routed(request_id=f"r{number}", n=2)))
    assert not found


async def _refused(gate: Dispatcher, request: RoutedRequest) -> None:
    with pytest.raises((Overloaded, Unavailable)):
        await collect(gate.generate(request))


async def test_requests_that_find_the_queue_full_leave_no_cycles() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_tokens=36) as (gate, _), asyncio.timeout(WAIT_S):
        running = [asyncio.create_task(collect(gate.generate(of("x", 0))))]
        held = await worker.submissions.get()
        running += [asyncio.create_task(collect(gate.generate(of(tenant, i)))) for i, tenant in enumerate("aab")]
        await asyncio.sleep(0)
        large = replace(routed(tuple(range(20))), tenant="c")
        await _refused(gate, replace(large, request_id="c"))
        with collecting() as found:
            for number in range(NUM_REQUESTS):
                await _refused(gate, replace(large, request_id=f"c{number}"))
        worker.script = answer
        held.give_all()
        await asyncio.gather(*running)
    assert not found


async def test_requests_evicted_from_the_queue_leave_no_cycles() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_tokens=36) as (gate, _), asyncio.timeout(WAIT_S):
        running = [asyncio.create_task(collect(gate.generate(of("x", 0))))]
        held = await worker.submissions.get()
        running += [asyncio.create_task(collect(gate.generate(of("a", i)))) for i in range(2)]
        await asyncio.sleep(0)
        with collecting() as found:
            last = asyncio.create_task(_refused(gate, of("a", 2)))
            await asyncio.sleep(0)
            running.append(asyncio.create_task(collect(gate.generate(of("b", 0)))))
            await last
            del last
        worker.script = answer
        held.give_all()
        await asyncio.gather(*running)
    assert not found


async def test_requests_that_wait_in_vain_leave_no_cycles() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_queue_s=0.2) as (gate, _), asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(gate.generate(of("x", 0))))
        held = await worker.submissions.get()
        with collecting() as found:
            await asyncio.gather(*(_refused(gate, of("a", number)) for number in range(NUM_REQUESTS)))
        worker.script = answer
        held.give_all()
        await running
    assert not [name for name in found if name.startswith(("router.", "tandem."))]
