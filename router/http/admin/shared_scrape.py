"""One reading for all who ask at once: what takes milliseconds of the event loop is made once, however many ask.

Nobody is told what was read before it asked: who comes while a reading is under way has part in the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable


class SharedReading:
    """Use it on one event loop."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        """`read` is never under way twice."""
        self._read = read
        self._under_way: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None
        """It has not begun yet."""

    async def __call__(self) -> bytes:
        """Read, or have part in what is about to be read. One who gives up waiting takes it from nobody else."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._make(self._under_way))
        return await asyncio.shield(self._next)

    async def _make(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(0)  # those whose questions came in the same turn of the loop
        self._under_way, self._next = self._next, None
        return await self._read()
