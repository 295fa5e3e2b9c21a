"""rediss://: Redis behind a TLS server, whose certificate is verified."""

import asyncio
import os
import random
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.redis_link import REDIS_BREAKER, RedisDown, RedisLink
from tests.support.redis_cluster import PublishingWorker, redis_settings_at, router
from tests.support.redis_server import RedisServer, until
from tests.support.router.cluster import PROMPT


@asynccontextmanager
async def tls_proxy(server: RedisServer, authority: trustme.CA):
    """Our redis-server is built without TLS; yields the port of a TLS proxy."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    carrying: set[asyncio.Task[None]] = set()

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            carrying.add(asyncio.create_task(carry(*pair)))

    http_server = await asyncio.start_server(enter, "127.0.0.1", 0, ssl=context)
    try:
        yield http_server.sockets[0].getsockname()[1]
    finally:
        http_server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def test_redis_over_tls_works_and_refuses_foreign_certificate(tmp_path: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    for name, authority in (("ours", ours), ("theirs", theirs)):
        authority.cert_pem.write_to_path(tmp_path / name)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer())
        port = await stack.enter_async_context(tls_proxy(server, ours))
        good = redis_settings_at(server, port=port, tls=True, ca=str(tmp_path / "ours"), timeout_s=2.0)
        bad = redis_settings_at(server, port=port, tls=True, ca=str(tmp_path / "theirs"), timeout_s=2.0)
        worker = await stack.enter_async_context(PublishingWorker("d0", good))
        reader = await stack.enter_async_context(router(0, good, live=1))
        await reader.ask(tuple(range(100)))
        await until(lambda: bool(worker.held) and reader.agrees_with(worker), "through TLS")
        refused = await stack.enter_async_context(router(1, bad, live=0))
        poll = refused.redis.links[1]
        await until(lambda: poll.failures > 0, "refused")
        assert not poll.is_up
        assert "certificate verify failed" in poll.reason
        assert len(await reader.ask(PROMPT)) == 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [("fifo", "a FIFO, not a regular file"), ("empty", "no certificate in PEM"), ("absent", "No such")],
)
async def test_redis_unreadable_ca_counts_as_down(tmp_path: Path, kind: str, message: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    settings = RedisSettings(host="127.0.0.1", port=1, tls=True, ca=str(tmp_path / kind), timeout_s=20.0)
    link = RedisLink(settings, CircuitBreaker(REDIS_BREAKER, random.Random(0)), use="poll", clock=lambda: 0.0)
    with pytest.raises(RedisDown, match=rf"redis\.ca: {tmp_path / kind}: {message}"):
        await link.execute([("PING",)])
