"""Server-sent events, written as they arise, until the client disconnects."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.slow_client import WRITE_TIMEOUT_S, SlowReader, within_write_timeout
from router.http.body.client_link import ClientLeft, Link, WhileConnected, link_of
from router.http.body.errors import error_object
from tandem.errors import InternalError, ServingError

DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
_log = logging.getLogger(__name__)


def event(content: dict[str, Any], *, event_id: bytes | None = None, kind: str | None = None) -> bytes:
    """Format one event, with its `id:` and `event:` lines where given. orjson writes infinities and NaN as null."""
    return frame(orjson.dumps(content), event_id=event_id, kind=kind)


def frame(data: bytes, *, event_id: bytes | None = None, kind: str | None = None) -> bytes:
    """Frame one line of data as a server-sent event."""
    head = b"" if event_id is None else b"id: " + event_id + b"\n"
    if kind is not None:
        head += b"event: " + kind.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventStream:
    """The events of one stream. The answer starts with its first event.

    Over a `Link` events are sent at once; before one is known, or without one, they wait for `ready`.
    """

    def __init__(self, send: Send, link: Link | None, start: dict[str, Any], write_timeout_s: float) -> None:
        """`start`: the ASGI message."""
        self._send = send
        self._link = link
        self._start = start
        self._timeout_s = write_timeout_s
        self._held: list[bytes] = []
        self.direct: Link | None = None
        """Once events are sent at once: where."""
        # No method of this stream, which would refer to itself and wait for a collection.
        self.write: Callable[[bytes], bool] = partial(_hold, self._held)
        """Writes one or more events without waiting; returns whether to await `ready` before the next."""
        self._sending = asyncio.Lock()
        self.started = False

    async def ready(self) -> None:
        """Return when the client has read what was written."""
        async with self._sending:
            if self._held:
                await self._send_body(self._take_held(), more=True)
                if self._link is not None:
                    self.direct, self.write = self._link, self._link.write
            if self.direct is not None and self.direct.is_paused:
                await within_write_timeout(self.direct.drain(), self._timeout_s)

    async def end(self, closing: bytes) -> None:
        """Write the end mark."""
        await self._send_body(self._take_held() + closing, more=False)

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        return held

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send(self._start)
        sending = self._send({"type": "http.response.body", "body": body, "more_body": more})
        if self._link is None or self._link.is_paused:
            await within_write_timeout(sending, self._timeout_s)
        else:
            # There is room, so it waits for nothing.
            await sending


def _hold(held: list[bytes], events: bytes) -> bool:
    held.append(events)
    return True


def _as_it_is(events: EventStream) -> Any:
    return events


class SseResponse(Response):
    """Streams what `run` writes; an error before the first event is an ordinary error answer, a later one an event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        run: Callable[[Any], Awaitable[None]],
        *,
        into: Callable[[EventStream], Any] = _as_it_is,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        format_error: Callable[[ServingError], bytes] | None = None,
        closing: bytes = DONE,
    ) -> None:
        """`run` receives the result of `into` for the stream. `format_error`: formats error events if not OpenAI's;
        `closing`: the end mark.
        """
        # Not starlette's own, which states a length, and takes several calls to find out what is known here.
        self.status_code, self.background, self.body = 200, None, b""
        self.raw_headers = list(_HEADERS)
        self._run = run
        self._into = into
        self._format_error = format_error or _error_event
        self._closing = closing
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises what `run` raises before its first event, for the application's handlers."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        stream = EventStream(send, link_of(scope), start, self._write_timeout_s)
        try:
            async with WhileConnected(scope, receive):
                await self._fill(stream)
                await stream.end(self._closing)
        except SlowReader:
            _log.warning("closed the stream of a client that had not read for %s s", self._write_timeout_s)
        except ClientLeft:
            _log.debug("a client disconnected from its stream")

    async def _fill(self, stream: EventStream) -> None:
        try:
            await self._run(self._into(stream))
        except SlowReader:
            raise
        except ServingError as error:
            if not stream.started:
                raise
            stream.write(self._format_error(error))
        except Exception:
            # The outermost handler of the stream: a bug of ours must still end in a well-formed event.
            if not stream.started:
                raise
            _log.exception("a stream failed")
            stream.write(self._format_error(InternalError("internal error")))


def _error_event(error: ServingError) -> bytes:
    return event(error_object(error))
