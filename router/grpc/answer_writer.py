"""Messages of one answer that gRPC has yet to send: generation continues meanwhile, up to a bound."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from router.api.slow_client import within_write_timeout

_MOST_UNSENT = 16
"""Unsent messages beyond which a client counts as slow; gRPC buffers some 64 KiB more."""


class AnswerWriter:
    """Sends messages in order while entered."""

    def __init__(self, write: Callable[[Any], Awaitable[None]], *, write_timeout_s: float) -> None:
        self._write = write
        self._timeout_s = write_timeout_s
        self._unsent: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._send())
        self._task.add_done_callback(lambda _: self._moved.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def enqueue(self, message: Any) -> bool:
        """Queue the next message, or a function that makes it; return whether to await `flush` before more."""
        self._unsent.append(message)
        self._arrived.set()
        return len(self._unsent) >= _MOST_UNSENT

    async def flush(self) -> None:
        """Return when everything has been sent. Raises SlowReader, or what sending raised."""
        while self._unsent:
            if self._task is not None and self._task.done():
                self._task.result()
            self._moved.clear()
            await within_write_timeout(self._moved.wait(), self._timeout_s)

    async def _send(self) -> None:
        while True:
            while self._unsent:
                message = self._unsent[0]
                await self._write(message() if callable(message) else message)
                self._unsent.popleft()
                self._moved.set()
            self._arrived.clear()
            await self._arrived.wait()
