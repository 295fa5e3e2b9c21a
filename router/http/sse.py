"""Server-sent events that end when the client does, and work that a departing client cancels."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.errors import error_object
from tandem.errors import Cancelled, InternalError, ServingError

WRITE_TIMEOUT_S = 30.0
"""A reader whose socket takes nothing for this long is given up."""
DONE = b"data: [DONE]\n\n"
_log = logging.getLogger(__name__)


def event(content: dict[str, Any], event_id: bytes | None = None) -> bytes:
    """One event. orjson writes infinities and NaN as null."""
    if event_id is not None:
        return b"id: " + event_id + b"\ndata: " + orjson.dumps(content) + b"\n\n"
    return b"data: " + orjson.dumps(content) + b"\n\n"


_T = TypeVar("_T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, run in one task of its own. Raises Cancelled, with `work` ended, when the client leaves."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client left")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _SlowReader(Exception):
    """The client's socket took nothing for too long."""


class SseResponse(Response):
    """Streams events; an error before the first of them is an ordinary error answer, a later one an event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._events = events
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what the stream raises before its first event, for the application's handlers."""
        try:
            await unless_disconnected(receive, self._pump(send))
        except Cancelled:
            _log.debug("a client left its stream")
        except _SlowReader:
            _log.warning("a client did not read its stream for %s s and was given up", self._write_timeout_s)

    async def _pump(self, send: Send) -> None:
        started = False

        async def start() -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(chunk: bytes, *, more: bool) -> None:
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
            except TimeoutError:
                raise _SlowReader from None

        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    await start()
                    await write(chunk, more=True)
            except ServingError as error:
                if not started:
                    raise
                await write(event(error_object(error)), more=True)
            except _SlowReader:
                raise
            except Exception:
                # The stream's interceptor: a fault of ours must still end in a readable event.
                if not started:
                    raise
                _log.exception("a stream failed")
                await write(event(error_object(InternalError("internal error"))), more=True)
            await start()
            await write(DONE, more=False)
