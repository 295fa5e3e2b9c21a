"""A client's connection, with more than ASGI offers: writing without waiting, and noticing when the client leaves.

Our own server offers both (`EXTENSION` in the scope). Under any other server `send` and `receive` are used.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Message, Receive, Scope, Send

from tandem.errors import Cancelled

EXTENSION = "tandem.link"
WHOLE_ANSWER = "tandem.http.response.whole"
"""Type of an ASGI message that is an answer as a whole: `status`, `headers` and `body`. Only a server that offers a
link takes it. Of the headers, which nothing checks, `content-length` is one and `connection` is none."""


class ClientLeft(Cancelled):
    """The client has disconnected."""


class Link(Protocol):
    """One request's connection to its client."""

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read: the transport's buffer is above its high-water mark."""
        ...

    async def drain(self) -> None:
        """Return when it is not paused, or the client has disconnected."""
        ...

    async def answer(self, whole: Message, send: Send) -> None:
        """Write a WHOLE_ANSWER at once; `send`, the server's own, is used where there is more to do."""
        ...

    def write(self, body: bytes) -> bool:
        """Write a chunk of a body without a length, whose start was sent; return whether the client is paused now.

        The chunk is lost when the client has disconnected.
        """
        ...

    def descriptor(self) -> int | None:
        """Return the connection's socket if chunks may be written to it directly: it has no TLS, all that was written
        has been sent, and the client is there; else None. The answer holds until something else is written.
        """
        ...

    def write_rest(self, rest: bytes) -> bool:
        """Write what the socket did not take of a chunk that was written to it directly; as `write`."""
        ...

    def whole_body(self) -> bytes | None:
        """Return the request's body if all of it has arrived and none of it was received yet."""
        ...

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before its answer is complete, at once if it has; None: stop doing so."""
        ...


def link_of(scope: Scope) -> Link | None:
    """Return the link that the server offers, if it is ours."""
    link: Link | None = scope.get("extensions", {}).get(EXTENSION)
    return link


class WhileConnected:
    """An async context whose body is cancelled when the client leaves; then ClientLeft is raised."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._link = link_of(scope)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self._task = task
        if self._link is None:
            self._watch = asyncio.create_task(self._wait())
        else:
            self._link.on_leave(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._link is not None:
            self._link.on_leave(None)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._left and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise ClientLeft("the client disconnected") from None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()
