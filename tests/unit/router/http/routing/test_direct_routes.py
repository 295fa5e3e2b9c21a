"""Routes called below FastAPI answer as FastAPI itself would."""

from collections.abc import Iterable
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import router.http.app
from router.access.api_keys import ApiKeyStore
from router.http.body.json_body import BodyBounds, JsonBody
from router.http.body.strict_body import StrictBody
from router.http.routing.access import AccessGuard, ClientAccess
from router.http.routing.direct_routes import DirectRoutes
from tandem.config.cluster import RouterConfig
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, routes_of
from tests.support.router.servers.whole_app import whole_app

WORDS = {"model": fakes.MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
BODIES = {CHAT: HELLO, PLAIN: {"prompt": "a"}, "/v1/responses": {"input": "a"}, "/v1/messages": WORDS}
VARYING = ("x-request-id", "content-length")
KEYED = RouterConfig(api_keys=("a-key",), max_body_bytes=1 << 16)
BOUNDS = BodyBounds.for_model(1 << 16, 512)


async def answers() -> list[tuple[int, dict[str, str], str]]:
    """Of good and bad requests to each direct route, with what is new in each left out."""
    parts = fakes.make_servers(fakes.make_tokenizer(), KEYED)
    parts.say("hello")
    found = []
    async with client_of(parts) as client:
        key = {"x-api-key": "a-key", "x-request-id": "mine"}
        for path, body in BODIES.items():
            for content, headers in (
                ({"json": body}, key),
                ({"json": body | {"stream": True}}, key),
                ({"json": body | {"temperature": 9}}, key),
                ({"json": body | {"nonsense": 1}}, key),
                ({"json": body}, {}),
                ({"content": b"["}, key),
                ({"content": b" " * (1 << 17)}, key),
            ):
                answer = await client.post(path, headers=headers, **content)
                headers = {name: answer.headers[name] for name in answer.headers if name not in VARYING}
                found.append((answer.status_code, headers, answer.text if answer.status_code >= 400 else ""))
        page = (await client.get("/metrics", headers=key)).text
    counted = [line for line in page.splitlines() if line.startswith("tandem_http_requests_total{")]
    return [*found, *((0, {}, line) for line in sorted(counted))]


async def test_direct_route_answers_like_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    directly = await answers()
    monkeypatch.setattr(router.http.app, "DIRECT_PATHS", ())
    assert directly == await answers()
    assert {200, 400, 401, 413} <= {status for status, _, _ in directly}


def test_direct_routes_are_exactly_the_generating_ones() -> None:
    app = whole_app()
    found: Iterable[str] = app._app._direct  # type: ignore[attr-defined]
    assert set(found) == {CHAT, PLAIN, "/v1/responses", "/v1/messages"}
    assert set(found) < {route.path for route in routes_of(app)}


class _Body(StrictBody):
    text: str


def application(guard: AccessGuard, endpoint: Any, *more: Any) -> FastAPI:
    api = FastAPI(openapi_url=None)
    dependencies = [Depends(ClientAccess(guard)), *map(Depends, more)]
    api.add_api_route("/new", endpoint, methods=["POST"], dependencies=dependencies)
    return api


async def _nothing() -> None:
    """A dependency of its own."""


async def takes_body(request: Request, body: Annotated[_Body, Depends(JsonBody(_Body))]) -> Response:
    return Response(body.text + request.url.path)


async def takes_more(request: Request, body: Annotated[_Body, Depends(JsonBody(_Body))], limit: int = 1) -> Response:
    return Response(body.text * limit)


async def takes_nothing(request: Request) -> Response:
    return Response()


def test_direct_route_with_other_dependencies_is_refused() -> None:
    guard = AccessGuard(ApiKeyStore(), RouterConfig())
    DirectRoutes(application(guard, takes_body), guard, BOUNDS, ["/new"])
    for endpoint, *more in ((takes_more,), (takes_nothing,), (takes_body, _nothing)):
        with pytest.raises(TypeError, match="/new"):
            DirectRoutes(application(guard, endpoint, *more), guard, BOUNDS, ["/new"])


async def test_direct_routes_pass_raw_path_to_fastapi() -> None:
    seen = []

    async def api(scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await Response()(scope, _receive, send)

    app = DirectRoutes(FastAPI(openapi_url=None), AccessGuard(ApiKeyStore(), RouterConfig()), BOUNDS, [])
    app._api = api  # type: ignore[assignment]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        await client.get("/v1/models/a%2Fb%20c?d=e")
    assert seen == ["/v1/models/a%2Fb%20c"]
