"""GET /status/snapshot and GET /status/events: the cluster as it is now, once or every second."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.http.body.sse import EventStream, SseResponse
from router.status.feed import StatusFeed
from tandem.errors import InvalidRequest

MOST_EVENTS = 300
"""Of one stream: who wants more shows the key again, which may not be good any more."""
_NOT_KEPT = {"Cache-Control": "no-store"}


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
