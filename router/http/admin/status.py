"""GET /status/snapshot and GET /status/events: the cluster as it is now, once or every second."""

from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from router.http.body.sse import EventStream, SseResponse
from router.http.routing.access_guard import Handler, OperatorPage, operator
from router.http.routing.route_table import Routes
from router.status.feed import StatusFeed
from tandem.errors import InvalidRequest

MOST_EVENTS = 300
"""Of one stream: who wants more shows the key again, which may not be good any more."""
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
    # Kept, but never shown without asking whether it is still the same.
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"


class StatusRoutes:
    """Both; a key is asked for where there are keys, and never taken from the address."""

    def __init__(self, feed: StatusFeed, *, write_timeout_s: float) -> None:
        self._feed = feed
        self._write_timeout_s = write_timeout_s

    async def snapshot(self, request: Request) -> Response:
        """As of now, or of half a second ago. Raises InvalidRequest."""
        _check_query(request)
        content = await self._feed.snapshot(request.state.tenant)
        return Response(content, headers=_NOT_KEPT, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """One event a second, for five minutes, or until the client leaves, reads nothing or the router drains."""
        _check_query(request)
        return SseResponse(partial(self._stream, request.state.tenant), write_timeout_s=self._write_timeout_s)

    async def _stream(self, tenant: str, events: EventStream) -> None:
        with self._feed.listening(tenant) as listener:
            status: bytes | None = await self._feed.snapshot(tenant)
            left = MOST_EVENTS
            while status is not None and left:
                events.write(b"data: " + status + b"\n\n")
                await events.ready()
                status, left = await listener.next(), left - 1


def _check_query(request: Request) -> None:
    if request.url.query:
        raise InvalidRequest("this page has no parameters; a key goes into the Authorization header")


def add_page(routes: Routes) -> None:
    """The page at `/`, what it is made of under `/status/`."""
    for name, media_type, content in _files():
        path = "/" if name == _INDEX else f"/status/{name}"
        routes.add("GET", path, operator(_shown(content, media_type), OperatorPage.PAGE))


def _files() -> Iterator[tuple[str, str, bytes]]:
    for file in (resources.files("router") / "status" / "page").iterdir():
        stem, dot, ending = file.name.rpartition(".")
        if stem and (media_type := _TYPES.get(dot + ending)) is not None:
            yield file.name, media_type, file.read_bytes()


def _shown(content: bytes, media_type: str) -> Handler:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return show
