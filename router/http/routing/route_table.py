"""Which handler answers a path, and how its errors look. Paths are few and known: a table, no patterns."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.body.errors import ErrorShape, error_object, error_response, method_not_allowed
from router.http.routing.access_guard import Guard, Guarded
from tandem.errors import InternalError, RouteNotFound, ServingError

ROUTE_KEY = "tandem.route"
"""Where the scope says which route it is: the table's words, never the client's."""
_SHAPE_KEY = "tandem.error_shape"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    path: str
    method: str
    guarded: Guarded
    show_error: ErrorShape


class Routes:
    """The ASGI application inside the envelope."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._routes: dict[str, dict[str, _Route]] = {}
        self._below: dict[tuple[str, str], dict[str, _Route]] = {}
        """By what a path begins and ends with; those with an end of their own first."""
        self._off: dict[str, str] = {}

    def add(self, method: str, path: str, guarded: Guarded, *, show_error: ErrorShape = error_object) -> None:
        """`path`: with a `*`, all that have something in its place. A dict that a handler returns is shown as JSON.

        `guarded`: made by `public` or `operator`. Raises TypeError for a handler of which neither was said.
        """
        if not isinstance(guarded, Guarded):
            raise TypeError(f"{path}: say for whom it is, with public() or operator()")
        route = _Route(path=path, method=method, guarded=guarded, show_error=show_error)
        if "*" in path:
            begin, _, end = path.partition("*")
            self._below.setdefault((begin, end), {})[method] = route
            self._below = dict(sorted(self._below.items(), key=lambda item: not item[0][1]))
        else:
            self._routes.setdefault(path, {})[method] = route

    def off(self, path: str, setting: str) -> None:
        """There is no such path, nor any below it, because a setting has not turned it on: whoever asks is told."""
        self._off[path] = setting

    def described(self) -> Iterator[tuple[str, str, Guarded, ErrorShape]]:
        """Method, path and handler of each, and how its errors look."""
        for methods in (*self._routes.values(), *self._below.values()):
            for route in methods.values():
                yield route.method, route.path, route.guarded, route.show_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            response = await self._respond(scope, receive, send)
            await response(scope, receive, send)
        except ServingError as error:
            if isinstance(error, InternalError):
                _log.error("internal error shown to a client: %s", error.message)
            await error_response(error, _shape(scope))(scope, receive, send)
        except Exception:  # noqa: BLE001  # the one interceptor for what nobody foresaw
            _log.exception("a request failed")
            await error_response(InternalError("internal error"), _shape(scope))(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> Response:
        path = _sent_path(scope)
        methods = self._routes.get(path)
        if methods is None:
            methods = next((found for around, found in self._below.items() if _is_within(path, *around)), {})
        route = methods.get(scope["method"])
        # Who asks is looked at before it is said whether there is such a method: as for any of the path's.
        known = route or next(iter(methods.values()), None)
        if known is not None:
            scope[ROUTE_KEY], scope[_SHAPE_KEY] = known.path, known.show_error
        request = Request(scope, receive, send)
        caller = self._guard.admit(request, known.guarded if known is not None else None)
        request.state.tenant, request.state.sees_all = caller.tenant, caller.operator
        if known is None:
            raise RouteNotFound(f"no route {scope['method']} {path[:200]}{self._why_off(path)}")
        if route is None:
            return method_not_allowed(", ".join(methods))
        answer = await route.guarded.handler(request)
        return Response(orjson.dumps(answer), media_type="application/json") if isinstance(answer, dict) else answer

    def _why_off(self, path: str) -> str:
        setting = next((setting for off, setting in self._off.items() if f"{path}/".startswith(f"{off}/")), None)
        return "" if setting is None else f": it is turned off here; the router's setting {setting} turns it on"


def _is_within(path: str, begin: str, end: str) -> bool:
    return path.startswith(begin) and path.endswith(end) and len(path) >= len(begin) + len(end)


def _sent_path(scope: Scope) -> str:
    """As the client spelled it, nothing decoded."""
    raw: bytes | None = scope.get("raw_path")
    return scope["path"] if raw is None else raw.decode("latin-1")


def _shape(scope: Scope) -> ErrorShape:
    shape: ErrorShape = scope.get(_SHAPE_KEY, error_object)
    return shape
