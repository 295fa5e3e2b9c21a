"""HEAD over real sockets: GET's answer without its body, on a connection that stays open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from router.http.server.http_server import HttpServer
from tandem.config.cluster import RouterConfig
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, client_of, routes_of
from tests.support.router.servers.whole_app import whole_app

WAIT_S = 20.0
VARYING = ("x-request-id", "date", "transfer-encoding")
OF_THE_MOMENT = ("/metrics", "/v1/usage", "/status/snapshot")
"""Longer or shorter with each request."""


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[HttpServer, list[str]]]:
    """A server with every possible route, and the paths of its GET routes without parameters."""
    app = whole_app()
    paths = [path for route in routes_of(app) if route.methods == {"GET"} and "{" not in (path := route.path_format)]
    async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as server:
        yield server, paths


def steady(headers: httpx.Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in VARYING}


async def test_head_equals_get_without_body_on_every_route() -> None:
    async with (
        asyncio.timeout(WAIT_S),
        listening() as (server, paths),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client,
    ):
        assert {"/", "/health", "/v1/models", "/status/events", "/v1/files"} <= set(paths)
        for path in [*paths, "/v1/models/tiny", "/v1/models/none", "/nowhere", CHAT]:
            head = await client.head(path)
            async with client.stream("GET", path) as got:
                assert (head.status_code, head.content) == (got.status_code, b""), path
                actual, expected = steady(head.headers), steady(got.headers)
            if path in OF_THE_MOMENT:
                assert actual.pop("content-length", None) is not None
                expected.pop("content-length")
            assert actual == expected, path


async def test_head_of_stream_ends_and_keeps_connection() -> None:
    async with listening() as (server, _), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for path in ("/status/events", "/status/events", "/health"):
            writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 200")
            assert "connection: close" not in head
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


async def test_head_is_counted_by_method_and_route() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig())
    async with client_of(parts) as client:
        assert (await client.head("/v1/models/tiny")).status_code == 200
        assert (await client.post("/v1/models")).headers["allow"] == "GET, HEAD"
        page = (await client.get("/metrics")).text
    counted = [line for line in page.splitlines() if line.startswith("tandem_http_requests_total{")]
    assert any('method="HEAD"' in line and 'route="/v1/models/*"' in line for line in counted), counted
