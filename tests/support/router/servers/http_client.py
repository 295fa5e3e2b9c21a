"""The HTTP server in process, and how its answers are read."""

import json
from typing import Any

import httpx
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.types import ASGIApp

from router.http.app import create_app
from tests.support.router.servers import fakes

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def app_of(parts: fakes.Servers) -> ASGIApp:
    return create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)


def client_of(served: fakes.Servers | ASGIApp) -> httpx.AsyncClient:
    """A client of an application, or of one made for these parts: many tests that share one save its making."""
    app = app_of(served) if isinstance(served, fakes.Servers) else served
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def routes_of(app: ASGIApp) -> list[RouteContext]:
    """All routes of an application that `create_app` made."""
    return list(iter_route_contexts(app._app._api.routes))  # type: ignore[attr-defined]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]
