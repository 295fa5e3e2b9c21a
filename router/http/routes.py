"""Which handler answers a path, and how its errors look. Paths are few and known: a table, no patterns."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.errors import error_response, method_not_allowed
from tandem.errors import InternalError, RouteNotFound, ServingError

ROUTE_KEY = "tandem.route"
"""Where the scope says which route it is: the table's words, never the client's."""
_log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response | dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    path: str
    method: str
    handler: Handler


class Routes:
    """The ASGI application inside the envelope."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._below: dict[str, _Route] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`path` alone; ending in `/*`, all that is below it. A dict that a handler returns is shown as JSON."""
        route = _Route(path=path, method=method, handler=handler)
        if path.endswith("/*"):
            self._below[path.removesuffix("*")] = route
        else:
            self._routes[path] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            response = await self._respond(scope, receive, send)
            await response(scope, receive, send)
        except ServingError as error:
            if isinstance(error, InternalError):
                _log.error("internal error shown to a client: %s", error.message)
            await error_response(error)(scope, receive, send)
        except Exception:  # noqa: BLE001  # the one interceptor for what nobody foresaw
            _log.exception("a request failed")
            await error_response(InternalError("internal error"))(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> Response:
        path: str = scope["path"]
        route = self._routes.get(path)
        if route is None:
            route = next((r for prefix, r in self._below.items() if path.startswith(prefix)), None)
        if route is None:
            raise RouteNotFound(f"no route {scope['method']} {path[:200]}")
        scope[ROUTE_KEY] = route.path
        if scope["method"] != route.method:
            return method_not_allowed(route.method)
        answer = await route.handler(Request(scope, receive, send))
        return Response(orjson.dumps(answer), media_type="application/json") if isinstance(answer, dict) else answer
