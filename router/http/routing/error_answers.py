"""Turns errors, raised by a route or for lack of one, into answers in the format of the requested API."""

import logging
from collections.abc import Awaitable, Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.body.error_formats import error_shape
from router.http.body.errors import MethodNotAllowed, error_response
from router.http.body.strict_body import refusal_of
from router.http.routing.access import AccessGuard, access_of
from tandem.errors import Cancelled, InternalError, InvalidRequest, RouteNotFound, ServingError

_log = logging.getLogger(__name__)


class ErrorAnswers:
    """ASGI middleware that turns any error raised below it into an answer, if none has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def noted(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # noqa: BLE001  # also unexpected ones
            await answer_error(error, scope, receive, send, has_begun=has_begun)


async def answer_error(error: Exception, scope: Scope, receive: Receive, send: Send, *, has_begun: bool) -> None:
    """Answer with an error that was raised, unless an answer `has_begun`: then it is cut off, and only logged."""
    if not isinstance(error, ServingError):
        _log.error("a request failed%s", ", and its answer is cut off" if has_begun else "", exc_info=error)
        if not has_begun:
            await error_response(InternalError("internal error"), error_shape(scope))(scope, receive, send)
    elif has_begun:
        # No error can be sent any more: the server ends the connection, which tells the client.
        level = logging.DEBUG if isinstance(error, Cancelled) else logging.WARNING
        _log.log(level, "an answer is cut off: %s", error.message)
    else:
        if isinstance(error, InternalError):
            _log.error("internal error shown to a client: %s", error.message)
        await error_response(error, error_shape(scope))(scope, receive, send)


class MissingRoutes:
    """FastAPI's exception handlers for requests that no path operation answers, and for invalid parameters.

    Only callers that could use a route learn whether it, or a method of it, exists.
    """

    def __init__(self, guard: AccessGuard, disabled: Mapping[str, str]) -> None:
        """`disabled`: paths that exist only if a setting enables them, with the setting."""
        self._guard = guard
        self._disabled = disabled

    def add_to(self, api: FastAPI) -> None:
        api.add_exception_handler(HTTPException, self.on_http_exception)
        api.add_exception_handler(RequestValidationError, self.on_wrong_parameters)

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        """Raise the error for an unknown route, or an unsupported method of one."""
        status = error.status_code if isinstance(error, HTTPException) else None
        path: str = request.scope["path"]
        if status == 404:
            self._guard.admit(request)
            raise RouteNotFound(f"no route {request.method} {path[:200]}{self._why_disabled(path)}")
        if status != 405:
            raise InternalError("internal error") from error
        routes = [one for one in iter_route_contexts(request.app.routes) if one.path_regex.match(path)]
        self._guard.admit(request, access_of(routes[0]).page)
        refused = MethodNotAllowed("Method Not Allowed")
        allowed = [method for route in routes for method in route.methods or ()]
        # What answers GET answers HEAD (`router.http.server.middleware`).
        refused.allowed = ", ".join([*allowed, *(["HEAD"] if "GET" in allowed else [])])
        raise refused

    async def on_wrong_parameters(self, _request: Request, error: Exception) -> Response:
        """Raise InvalidRequest that names the parameter."""
        if not isinstance(error, RequestValidationError):
            raise InternalError("internal error") from error
        # The location, in the query or in the path, is left out.
        errors: list[ErrorDetails] = [one | {"loc": one["loc"][1:]} for one in error.errors()]
        if unknown := next((one for one in errors if one["type"] == "extra_forbidden"), None):
            name = str(unknown["loc"][0])[:40]
            raise InvalidRequest(f"{name!r} is not a parameter of this path", param=name)
        raise refusal_of(errors)

    def _why_disabled(self, path: str) -> str:
        found = (setting for root, setting in self._disabled.items() if f"{path}/".startswith(f"{root}/"))
        setting = next(found, None)
        return "" if setting is None else f": it is disabled; the router's setting {setting} enables it"
