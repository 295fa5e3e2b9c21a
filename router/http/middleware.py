"""Around every request: bounds on its headers, its id, and the count of its answer."""

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.errors import error_response
from router.http.routes import ROUTE_KEY
from router.metrics import RouterMetrics
from router.request_names import check_request_id
from tandem.errors import InvalidRequest

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Envelope:
    """ASGI middleware. A client's X-Request-Id is echoed and used nowhere else; absent, one is made."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        request_id = secrets.token_hex(16)

        async def enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            try:
                request_id = _given_id(scope) or request_id
            except InvalidRequest as error:
                await error_response(error)(scope, receive, enveloped)
                return
            await self._app(scope, receive, enveloped)
        finally:
            route = scope.get(ROUTE_KEY, "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_answered(route, method, status)


def _given_id(scope: Scope) -> str | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in headers) > MAX_HEADER_BYTES:
        raise InvalidRequest(f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them")
    given = [value for key, value in headers if key == b"x-request-id"]
    return check_request_id(given[0].decode("latin-1"), "X-Request-Id") if given else None
