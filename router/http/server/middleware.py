"""Wraps every request: bounds its headers, sets its id, and counts its answer."""

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.audit_log import AuditEntry, AuditLog, enter, leave
from router.api.request.request_ids import check_request_id
from router.http.body.client_link import WHOLE_ANSWER
from router.http.body.errors import error_response
from router.http.server.request_head import check_size
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import InvalidRequest, Unavailable
from tandem.telemetry.logs import REQUEST_ID, X_REQUEST_ID

_CLIENT_LEFT = 499
"""Status that is counted when the client left before its answer."""
_AGAIN_S = 1.0
_log = logging.getLogger(__name__)
_PARAMETER = re.compile(r"\{[^}]*\}")
_STARTS = frozenset({"http.response.start", WHOLE_ANSWER})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMiddleware:
    """ASGI middleware. A client's X-Request-Id is only echoed; if absent, one is made."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, audit: AuditLog) -> None:
        self._app = app
        self._metrics = metrics
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT
        client: tuple[str, int] | None = scope.get("client")
        entry = AuditEntry(server="http", client=client[0] if client else "", began_s=time.monotonic())

        def enveloped(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] in _STARTS:
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", entry.request_id.encode())]
            return send(message)

        token = enter(entry)
        named, shown = REQUEST_ID.set(entry.own_id), X_REQUEST_ID.set(entry.request_id)
        try:
            try:
                if (given := _given_id(scope)) is not None:
                    entry.request_id = given
                    X_REQUEST_ID.set(given)
            except InvalidRequest as error:
                entry.is_kept = True
                await error_response(error)(scope, receive, enveloped)
                return
            if scope["method"] == "HEAD":
                await _answer_head(self._app, scope, receive, enveloped)
            else:
                await self._app(scope, receive, enveloped)
        except asyncio.CancelledError:
            # Only the server cancels, when the time to drain is over; the task has nothing left to do.
            if status == _CLIENT_LEFT:
                ended = Unavailable("the router shut down before the answer was complete", retry_after_s=_AGAIN_S)
                await error_response(ended)(scope, receive, enveloped)
            else:
                _log.warning("cutting off an answer that takes longer than the drain timeout")
        except Exception:
            status = 500
            raise
        finally:
            REQUEST_ID.reset(named)
            X_REQUEST_ID.reset(shown)
            leave(token)
            matched = scope.get("route")
            # With a star for each parameter: never the client's text.
            route = "unknown" if matched is None else _starred(matched.path_format)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_answered(route, method, status)
            entry.route, entry.status = f"{method} {route}", str(status)
            if entry.is_kept:
                self._audit.keep(entry)


async def _answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as GET would be answered, without the body (RFC 9110, 9.3.2)."""
    # A stream would write past `send` over the link, which is left out. The server's own scope stays one of HEAD.
    as_get = {**scope, "method": "GET", "extensions": {}}
    is_over = False

    async def send_head(message: Message) -> None:
        nonlocal is_over
        if message["type"] == "http.response.start":
            await send(message)
        elif not is_over:
            # Also of a stream: it ends as if its client had left.
            is_over = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    try:
        await app(as_get, receive, send_head)
    finally:
        scope.update({name: as_get[name] for name in ("path", "route") if name in as_get})


@functools.cache
def _starred(path: str) -> str:
    return _PARAMETER.sub("*", path)


def _given_id(scope: Scope) -> str | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    check_size(headers)
    for name, value in headers:
        if name == b"x-request-id":
            return check_request_id(value.decode("latin-1"), "X-Request-Id")
    return None
