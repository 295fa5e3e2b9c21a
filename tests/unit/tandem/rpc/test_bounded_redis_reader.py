"""Bounds on what is read from a Redis connection, and that all our values fit."""

import asyncio

import pytest

from tandem.cluster_state.entries import CHANGES_BYTES, MAX_ID_LENGTH, STATE_BYTES, Process
from tandem.rpc.bounded_redis_reader import BoundedReader, ReplyTooLarge, most_bytes
from tandem.values.ids import Incarnation, WorkerId


def reader_of(data: bytes, *, allowed: int) -> tuple[BoundedReader, asyncio.StreamReader]:
    inner = asyncio.StreamReader()
    inner.feed_data(data)
    inner.feed_eof()
    reader = BoundedReader(inner)
    reader.allow(allowed)
    return reader, inner


async def test_bounded_reader_within_limit_reads() -> None:
    reader, _ = reader_of(b"line\r\n" + b"x" * 94, allowed=100)
    assert await reader.readline() == b"line\r\n"
    assert await reader.readexactly(50) == b"x" * 50
    assert await reader.read(1 << 16) == b"x" * 44
    assert await reader.read(1 << 16) == b""
    assert reader.at_eof()


@pytest.mark.parametrize("how", ["read", "readexactly"])
async def test_bounded_reader_beyond_limit_raises(how: str) -> None:
    reader, inner = reader_of(b"x" * 100_000, allowed=100)
    with pytest.raises(ReplyTooLarge):
        await getattr(reader, how)(90_000)
    assert len(inner._buffer) >= 100_000 - 101  # type: ignore[attr-defined]


async def test_bounded_reader_limit_counts_all_pieces() -> None:
    reader, _ = reader_of(b"x" * 200 + b"\r\n", allowed=100)
    for _ in range(100):
        assert await reader.read(1) == b"x"
    with pytest.raises(ReplyTooLarge):
        await reader.read(1)
    reader.allow(90)
    with pytest.raises(ReplyTooLarge):
        await reader.readline()


def test_bounded_reader_limit_fits_largest_reply() -> None:
    mark = Process(WorkerId("\U0001f98a" * MAX_ID_LENGTH), Incarnation((1 << 63) - 1)).mark.encode()
    frame = len(b"$1000000000\r\n\r\n")
    assert most_bytes([("ZREVRANGE", "k", 0, 9)]) >= 10 * (len(mark) + frame) + frame
    assert most_bytes([("GETRANGE", "k", 0, STATE_BYTES)]) >= STATE_BYTES + 1 + frame
    key, entry = len(mark) + 200, CHANGES_BYTES + 20 + 5 * frame
    command = ("XREAD", "COUNT", 16, "BLOCK", 200, "STREAMS", b"a", b"b", "0-0", "0-0")
    assert most_bytes([command]) >= 2 * (key + 3 * frame + 16 * entry)
    assert most_bytes([("SET", "k", b"v"), ("DEL", "k")]) < 10_000
