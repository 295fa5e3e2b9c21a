"""Answers generating routes without FastAPI: same declaration, same access, same body, same endpoint.

FastAPI solves the dependencies of each request anew, in a stack of middleware and exit stacks. For a chat request that
costs as much as a tenth of all that the router does (`docs/extend/adr/0017-fastapi.md`), so path operations whose only
dependencies are access and a body are called without it. Their declarations are read from the FastAPI application,
which could answer them just as well, and describes them.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.body.json_body import BodyBounds, JsonBody
from router.http.routing.access import AccessGuard, access_of
from router.http.routing.error_answers import answer_error

Endpoint = Callable[[Request, Any], Awaitable[Response]]


class DirectRoutes:
    """The ASGI application: calls some path operations of a FastAPI application directly, and passes on all others."""

    def __init__(self, api: FastAPI, guard: AccessGuard, bounds: BodyBounds, paths: Iterable[str]) -> None:
        """`paths`: POST operations to call directly, if the application has them.

        Raises TypeError for one that has parameters or dependencies besides access and its body.
        """
        self._api = api
        wanted = frozenset(paths)
        self._direct: dict[str, ASGIApp] = {
            route.path: _DirectRoute(route, guard, bounds)
            for route in iter_route_contexts(api.routes)
            if route.path in wanted and route.methods == {"POST"}
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the answer of the route's own application, to be awaited."""
        raw: bytes | None = scope.get("raw_path")
        if raw is not None:
            # As the client spelled it, without decoding.
            scope["path"] = raw.decode("latin-1")
        direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        return (direct or self._api)(scope, receive, send)


class _DirectRoute:
    def __init__(self, route: RouteContext, guard: AccessGuard, bounds: BodyBounds) -> None:
        access, *others = [one.call for one in route.dependant.dependencies]
        body = others[0] if len(others) == 1 else None
        if access is not access_of(route) or not isinstance(body, JsonBody):
            raise TypeError(f"{route.path}: a direct route depends on access and its body alone")
        if list(inspect.signature(route.endpoint or _DirectRoute).parameters) != ["request", "body"]:
            raise TypeError(f"{route.path}: the endpoint of a direct route has the parameters request and body")
        self._route = route.original_route
        self._page = access_of(route).page
        self._guard = guard
        self._bounds = bounds
        self._body = body
        self._endpoint: Endpoint = route.endpoint  # type: ignore[assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._route
        has_begun = False

        def noted(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            request = Request(scope, receive, send)
            self._guard.admit(request, self._page)
            body = await self._body.read(request, self._bounds)
            response = await self._endpoint(request, body)
            await response(scope, receive, noted)
        except Exception as error:  # noqa: BLE001  # also unexpected ones
            await answer_error(error, scope, receive, send, has_begun=has_begun)
