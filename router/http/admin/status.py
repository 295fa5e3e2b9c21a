"""GET /status/snapshot and GET /status/events: the cluster's status, once or every second; and the pages at / and
/docs.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from hashlib import blake2b
from importlib import resources
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from router.http.body.answer_object import AnswerObject, AnyObject, Count
from router.http.body.sse import EventStream, SseResponse, frame
from router.http.openapi.event_streams import openai_events
from router.http.routing.access import AccessGuard, ClientAccess, OperatorPage, PageAccess
from router.status.feed import StatusFeed
from tandem.errors import InvalidRequest

MOST_EVENTS = 300
"""Events per stream: for more, the client sends its key again, which may have been revoked."""
_NOT_KEPT = {"Cache-Control": "no-store"}


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Cached by browsers, but revalidated before each use.
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
"""Paths of pages; their assets are under /status/."""


class ModelStatus(AnswerObject):
    name: str
    max_model_len: Count
    has_chat_template: bool


class QueueStatus(AnswerObject):
    requests: Count
    tokens: Count
    oldest_s: Annotated[float, Field(ge=0)]


class PoolStatus(AnswerObject):
    role: Literal["prefill", "decode"]
    workers: list[AnyObject]


class HandoffStatus(AnswerObject):
    in_flight: Count
    shown: list[AnyObject]


class StatusObject(AnswerObject):
    """The cluster's current status."""

    model: ModelStatus
    processes: Annotated[int, Field(ge=1)]
    not_ready: str | None
    requests: dict[str, Count]
    queue: QueueStatus
    pools: list[PoolStatus]
    handoffs: HandoffStatus
    prefixes: list[AnyObject]
    recent: AnyObject
    curves: AnyObject
    decisions: list[AnyObject]


class StatusRoutes:
    """Path operations of the status; a key is required where there are keys, and never read from the URL."""

    def __init__(self, feed: StatusFeed, *, write_timeout_s: float) -> None:
        self._feed = feed
        self._write_timeout_s = write_timeout_s

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access), Depends(_check_query)])
        router.add_api_route("/status/snapshot", self.get_snapshot, methods=["GET"], response_model=StatusObject)
        router.add_api_route(
            "/status/events",
            self.stream_events,
            methods=["GET"],
            response_class=Response,
            responses={200: openai_events(StatusObject)},
        )
        return router

    async def get_snapshot(self, request: Request) -> Response:
        """Return the cluster's status, at most half a second old."""
        content = await self._feed.snapshot(request.state.tenant)
        return Response(content, headers=_NOT_KEPT, media_type="application/json")

    async def stream_events(self, request: Request) -> Response:
        """Stream the status every second, for five minutes, or until the client leaves or the router drains."""
        return SseResponse(partial(self._stream, request.state.tenant), write_timeout_s=self._write_timeout_s)

    async def _stream(self, tenant: str, events: EventStream) -> None:
        with self._feed.listening(tenant) as listener:
            status: bytes | None = await self._feed.snapshot(tenant)
            left = MOST_EVENTS
            while status is not None and left:
                events.write(frame(status))
                await events.ready()
                status, left = await listener.next(), left - 1


async def _check_query(request: Request) -> None:
    if request.url.query:
        raise InvalidRequest("this page has no parameters; send the key in the Authorization header")


def page_router(guard: AccessGuard) -> APIRouter:
    """Serve the pages at `/` and `/docs`, and their assets.

    StaticFiles is not used: its ETag is made from a file's time and size, and all files of an image have the same time.
    A script that changed without changing its length would stay in browsers' caches. The pages are not part of the API,
    so /openapi.json does not describe them.
    """
    router = APIRouter(dependencies=[Depends(PageAccess(guard, OperatorPage.PAGE))])
    for name, media_type, content in _files():
        path = _PATHS.get(name, f"/status/{name}")
        router.add_api_route(
            path, _page_endpoint(content, media_type), methods=["GET"], response_class=Response, include_in_schema=False
        )
    return router


def _files() -> Iterator[tuple[str, str, bytes]]:
    for file in (resources.files("router") / "status" / "page").iterdir():
        stem, dot, ending = file.name.rpartition(".")
        if stem and (media_type := _TYPES.get(dot + ending)) is not None:
            yield file.name, media_type, file.read_bytes()


def _page_endpoint(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}

    async def get_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return get_file
