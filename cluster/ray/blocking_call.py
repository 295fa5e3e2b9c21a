"""What one blocking call makes and another ends, held by an event loop that waits for neither."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def held(make: Callable[[], T], end: Callable[[T], None], *, end_s: float) -> AsyncIterator[T]:
    """What `make` returns, until `end`; each runs in a thread. For the end it waits `end_s` at most: it goes on alone.

    Whoever is cancelled while it is being made leaves nothing behind: it is ended as soon as it is there.
    """
    loop = asyncio.get_running_loop()
    making = loop.run_in_executor(None, make)

    def end_at_once(made: asyncio.Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            with suppress(RuntimeError):  # the loop takes no more threads: the process ends, and with it all it holds
                loop.run_in_executor(None, end, made.result())

    try:
        thing = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(end_at_once)
        raise
    try:
        yield thing
    finally:
        ending = loop.run_in_executor(None, end, thing)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), end_s)
