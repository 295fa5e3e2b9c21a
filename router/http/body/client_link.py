"""A client's connection, beyond what ASGI offers: writing without waiting, and noticing when the client leaves.

Our own server offers both (`EXTENSION` in the scope). Under any other one `send` and `receive` have to do.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, cast

from starlette.types import Receive, Scope

from tandem.errors import Cancelled

EXTENSION = "tandem.link"


class ClientLeft(Cancelled):
    """The client has left."""


class Link(Protocol):
    """One request's side of a connection."""

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read: more is already waiting than the transport likes to hold."""
        ...

    async def drain(self) -> None:
        """Return when it is not paused, or the client has left."""
        ...

    def write(self, body: bytes) -> bool:
        """A chunk of a body without a length, whose start has been sent; whether the client is paused now.

        Lost when the client has left.
        """
        ...

    def whole_body(self) -> bytes | None:
        """The request's body if all of it has come and nobody has begun to receive it."""
        ...

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before its answer is complete, at once if it has; None: no more."""
        ...


def link_of(scope: Scope) -> Link | None:
    """What the server offers, if it is ours."""
    return cast("Link | None", scope.get("extensions", {}).get(EXTENSION))


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
            raise ClientLeft("the client left") from None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()
