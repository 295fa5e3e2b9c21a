"""Bounds the time that a server waits for a client to read what it was sent."""

import asyncio
from collections.abc import Awaitable

from tandem.errors import Cancelled

WRITE_TIMEOUT_S = 30.0
"""A client that reads nothing for this long is given up."""


class SlowReader(Cancelled):
    """The client read nothing for too long."""


async def within_write_timeout(waiting: Awaitable[object], timeout_s: float) -> None:
    """Return when `waiting` does. Raises SlowReader after `timeout_s`, and what `waiting` raises."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiting
    except TimeoutError:
        raise SlowReader(f"the client did not read its answer for {timeout_s:g} s") from None
