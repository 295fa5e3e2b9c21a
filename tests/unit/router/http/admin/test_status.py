"""/status/snapshot, /status/events and the files of the page at /, over real sockets."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from router.http.app import OptionalRoutes, create_app
from router.http.server.http_server import HttpServer
from router.status.feed import StatusFeed
from router.text.tokenizer import Tokenizer
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tests.support.router.servers import fakes
from tests.support.router.whole_router import WholeRouter
from tests.support.router.whole_status import sources_of

WAIT_S = 20.0
KEYED = RouterConfig(api_keys=(ApiKey(key=SecretStr("key-a"), tenant="a"), ApiKey(key=SecretStr("key-b"), tenant="b")))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


class World:
    """A server with a status, and a client of it."""

    def __init__(self, whole: WholeRouter, feed: StatusFeed, client: httpx.AsyncClient, listener: HttpServer) -> None:
        self.whole = whole
        self.feed = feed
        self.client = client
        self.listener = listener


@asynccontextmanager
async def world(tokenizer: Tokenizer, config: RouterConfig | None = None, most: int = 4) -> AsyncIterator[World]:
    whole = WholeRouter(1)
    parts = fakes.make_servers(tokenizer, config)
    async with StatusFeed(sources_of(whole), most_listeners=most) as feed:
        app = create_app(
            parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics, OptionalRoutes(status=feed)
        )
        async with (
            HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as listener,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", timeout=WAIT_S, trust_env=False) as client,
        ):
            yield World(whole, feed, client, listener)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def next_status(lines: AsyncIterator[str]) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: {"):
            return dict(orjson.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream ended")


async def test_status_snapshot_equals_events(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.status.feed.TURN_S", 0.01)
    async with world(tokenizer) as w, w.client.stream("GET", "/status/events") as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        first = await next_status(lines)
        answer = await w.client.get("/status/snapshot")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json().keys() == first.keys()
        assert answer.json()["pools"] == first["pools"]
        w.whole.registry.draining(w.whole.workers[0].info.key, "told to")
        w.whole.now_s += 1.0
        async with asyncio.timeout(WAIT_S):
            while (await next_status(lines))["pools"][1]["workers"][0]["state"] != "draining":
                pass


async def test_departed_status_listener_frees_its_slot(tokenizer: Tokenizer) -> None:
    async with world(tokenizer, most=1) as w:
        async with w.client.stream("GET", "/status/events") as stream:
            await next_status(stream.aiter_lines())
            refused = await w.client.get("/status/events")
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "10"
            assert (await w.client.get("/status/snapshot")).status_code == 200
        async with asyncio.timeout(WAIT_S):
            while w.feed.num_listeners:  # noqa: ASYNC110 - the server hears of it by itself
                await asyncio.sleep(0.01)
        async with w.client.stream("GET", "/status/events") as stream:
            assert stream.status_code == 200


async def test_drain_disconnects_status_listeners(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as w, w.client.stream("GET", "/status/events") as stream:
        lines = stream.aiter_lines()
        await next_status(lines)
        w.feed.close()
        assert [line async for line in lines if line] == ["data: [DONE]"]
        assert (await w.client.get("/status/events")).status_code == 503
        assert (await w.client.get("/status/snapshot")).status_code == 503


async def test_status_stream_is_bounded_in_events(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.status.feed.TURN_S", 0.01)
    monkeypatch.setattr("router.http.admin.status.MOST_EVENTS", 3)
    async with world(tokenizer) as w:
        lines = (await w.client.get("/status/events")).text.split("\n\n")
        assert [line[:7] for line in lines] == ["data: {"] * 3 + ["data: [", ""]
        assert w.feed.num_listeners == 0


async def test_status_client_reading_nothing_is_dropped(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.app.STATUS_WRITE_TIMEOUT_S", 0.1)
    async with world(tokenizer) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.listener.port, limit=1024)
        writer.write(b"GET /status/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(WAIT_S):
            while not w.feed.num_listeners:  # noqa: ASYNC110 - the server hears of it by itself
                await asyncio.sleep(0.01)
            while w.feed.num_listeners:
                for listener in tuple(w.feed._listeners):
                    listener.publish(b" " * (1 << 20))
                await asyncio.sleep(0.001)
        writer.close()
        assert reader is not None


@pytest.mark.parametrize("path", ["/status/snapshot", "/status/events"])
async def test_status_requires_key_in_header(tokenizer: Tokenizer, path: str) -> None:
    async with world(tokenizer, KEYED) as w:
        for headers in ({}, bearer("key-c"), {"Authorization": "key-a"}):
            answer = await w.client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert b"d0" not in answer.content
        for query in ("?key=key-a", "?api_key=key-a", "?x"):
            assert (await w.client.get(path + query)).status_code == 401
            answer = await w.client.get(path + query, headers=bearer("key-a"))
            assert answer.status_code == 400
            assert "key-a" not in answer.text
        async with w.client.stream("GET", path, headers=bearer("key-a")) as stream:
            assert stream.status_code == 200


async def test_status_page_has_no_data_and_strict_policy(tokenizer: Tokenizer) -> None:
    async with world(tokenizer, KEYED) as w:
        page = await w.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "toy" not in page.text
        again = await w.client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        changed = await w.client.get("/", headers={"If-None-Match": '"other"'})
        assert changed.content == page.content


async def test_docs_page_is_self_contained_under_its_policy(tokenizer: Tokenizer) -> None:
    async with world(tokenizer, KEYED) as w:
        page = await w.client.get("/docs")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "//" not in page.text.replace("<!doctype html>", "")
        assert "<script>" not in page.text
        assert "style=" not in page.text
        linked = re.findall(r'(?:src|href)="(/status/[^"]+)"', page.text)
        assert {"/status/docs.js", "/status/docs.css"} <= set(linked)
        for path in linked:
            file = await w.client.get(path)
            assert file.status_code == 200, path
            assert file.headers["x-content-type-options"] == "nosniff"
        script = (await w.client.get("/status/docs.js")).text
        assert 'fetch("/openapi.json"' in script
        assert "innerHTML" not in script


async def test_app_without_status_has_no_page(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer)
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path in ("/", "/docs", "/status/snapshot", "/status/events"):
            assert (await client.get(path)).status_code == 404
