"""Bounds what is read from Redis: another writer may store values of any size there.

Redis bounds what it gives of a value (GETRANGE), but neither a member of a sorted set nor a field of a stream.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.cluster_state.entries import CHANGES_BYTES, MAX_ID_LENGTH

_FRAME_BYTES = 1024
"""Maximum bytes of a reply besides its contents: of its framing, of an error, or of a status."""
_MEMBER_BYTES = 4 * MAX_ID_LENGTH + 64
"""Maximum bytes of a member of our sorted sets: a worker's id, at most four bytes a character, and its process."""
_ENTRY_BYTES = CHANGES_BYTES + 64
_ROLE_BYTES = 1 << 16
"""Maximum bytes of a reply to ROLE, which lists all replicas."""

_SENTINEL_BYTES = 1 << 14
"""Maximum bytes of what a sentinel says of a master."""


class ReplyTooLarge(ValueError):
    """A reply is larger than anything that Tandem writes."""


class BoundedReader:
    """Wraps an `asyncio.StreamReader`, with the methods that parsers call."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._left = 0

    def allow(self, size: int) -> None:
        """Set how many bytes may be read from now on."""
        self._left = size

    async def read(self, size: int = -1) -> bytes:
        """Read as the stream reader does. Raises ReplyTooLarge."""
        # One byte more than allowed is enough to know.
        data = await self._reader.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        return self._counted(data)

    async def readexactly(self, size: int) -> bytes:
        """Read as the stream reader does. Raises ReplyTooLarge before anything is read."""
        if size > self._left:
            raise ReplyTooLarge(f"a reply has at least {size} bytes")
        return self._counted(await self._reader.readexactly(size))

    async def readline(self) -> bytes:
        """Read a line as the stream reader does, which bounds its length. Raises ReplyTooLarge."""
        return self._counted(await self._reader.readline())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ReplyTooLarge("a reply is larger than anything that Tandem writes")
        return data


def most_bytes(commands: Sequence[Sequence[str | bytes | int]]) -> int:
    """Maximum bytes of the replies to all of these commands, if every value is ours."""
    return sum(_FRAME_BYTES + _contents(command) for command in commands)


def _contents(command: Sequence[str | bytes | int]) -> int:
    match list(command):
        case ["GETRANGE", _, int(first), int(last)]:
            return last - first + 1
        case ["ZREVRANGE", _, int(first), int(last)]:
            return (last - first + 1) * _MEMBER_BYTES
        case ["XREAD", "COUNT", int(count), "BLOCK", _, "STREAMS", *logs]:
            return len(logs) // 2 * (_FRAME_BYTES + count * _ENTRY_BYTES)
        case ["ROLE"]:
            return _ROLE_BYTES
        case ["SENTINEL", "MASTER", _]:
            return _SENTINEL_BYTES
    return 0
