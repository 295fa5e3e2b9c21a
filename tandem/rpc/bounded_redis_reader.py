"""Reads no more of a connection than was asked for: who can write to Redis may put there what he likes, of any size.

Redis bounds what it gives of a value (GETRANGE), but neither a member of a sorted set nor a field of a stream.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.cluster_state.entries import CHANGES_BYTES, MAX_ID_LENGTH

_FRAME_BYTES = 1024
"""Around an answer's contents, and of answers that have none; an error is shorter, too."""
_MEMBER_BYTES = 4 * MAX_ID_LENGTH + 64
"""Of a sorted set of ours: a worker's id, of characters that take four bytes at most, and its process."""
_ENTRY_BYTES = CHANGES_BYTES + 64


class ReplyTooLarge(ValueError):
    """An answer has more bytes than anybody of ours has written."""


class BoundedReader:
    """In front of an `asyncio.StreamReader`, with the methods that parsers call."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._left = 0

    def allow(self, size: int) -> None:
        """So many bytes may come from now on."""
        self._left = size

    async def read(self, size: int = -1) -> bytes:
        """As the reader's own. Raises ReplyTooLarge."""
        # One byte more than allowed is enough to know.
        data = await self._reader.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        return self._counted(data)

    async def readexactly(self, size: int) -> bytes:
        """As the reader's own. Raises ReplyTooLarge, before anything is read."""
        if size > self._left:
            raise ReplyTooLarge(f"an answer of {size} bytes and more")
        return self._counted(await self._reader.readexactly(size))

    async def readline(self) -> bytes:
        """As the reader's own, which bounds a line. Raises ReplyTooLarge."""
        return self._counted(await self._reader.readline())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ReplyTooLarge("an answer is larger than anything of ours")
        return data


def most_bytes(commands: Sequence[Sequence[str | bytes | int]]) -> int:
    """Of the answers to all of these, if everything is ours."""
    return sum(_FRAME_BYTES + _contents(command) for command in commands)


def _contents(command: Sequence[str | bytes | int]) -> int:
    match list(command):
        case ["GETRANGE", _, int(first), int(last)]:
            return last - first + 1
        case ["ZREVRANGE", _, int(first), int(last)]:
            return (last - first + 1) * _MEMBER_BYTES
        case ["XREAD", "COUNT", int(count), "BLOCK", _, "STREAMS", *logs]:
            return len(logs) // 2 * (_FRAME_BYTES + count * _ENTRY_BYTES)
    return 0
