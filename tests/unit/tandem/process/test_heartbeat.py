"""Messages of a process to its parent, over a real pipe."""

import asyncio
import json
import os

import pytest

from tandem.process import heartbeat
from tandem.process.heartbeat import Heartbeat


async def read(fd: int) -> bytes:
    return await asyncio.to_thread(os.read, fd, 1 << 16)


def is_full(fd: int) -> bool:
    """Write; returns whether that would block."""
    try:
        os.write(fd, b"x" * 4096)
    except BlockingIOError:
        return True
    return False


async def test_heartbeat_writes_ready_line_then_beats_until_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    reading, writing = os.pipe()
    with Heartbeat(writing, beats=True) as heart:
        heart.begin({"http": "x"})
        received = b""
        while received.count(b".") < 3:
            received += await read(reading)
        line, _, beats = received.partition(b"\n")
        assert json.loads(line) == {"http": "x"}
        assert set(beats) == {ord(".")}
    while await read(reading):
        pass
    os.close(reading)


async def test_heartbeat_full_or_closed_pipe_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    reading, writing = os.pipe()
    with Heartbeat(writing, beats=True) as heart:
        heart.begin({})
        os.set_blocking(writing, False)
        while not is_full(writing):
            pass
        for _ in range(3):
            await asyncio.sleep(0)
        os.close(reading)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_heartbeat_without_beats_writes_once() -> None:
    reading, writing = os.pipe()
    with Heartbeat(writing, beats=False) as heart:
        heart.begin({"a": 1})
        assert json.loads(await read(reading)) == {"a": 1}
        assert await read(reading) == b""
    os.close(reading)
    with Heartbeat(None, beats=True) as heart:
        heart.begin({})


async def test_heartbeat_news_are_whole_and_latest_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    reading, writing = os.pipe()
    with Heartbeat(writing, beats=True) as heart:
        heart.begin({})
        os.set_blocking(writing, False)
        while not is_full(writing):
            pass
        for number in range(3):
            heart.send({"number": number, "long": "y" * 100_000})
        received = b""
        while received.count(b"\n") < 5:  # the ready line; an end before each news and behind it
            received += await read(reading)
        while not received.endswith(b".."):
            received += await read(reading)
    os.close(reading)
    news = [json.loads(line.strip(b".x")) for line in received.split(b"\n")[1:] if line.strip(b".x")]
    assert [one["number"] for one in news] == [0, 2], "one had begun"
    assert {len(one["long"]) for one in news} == {100_000}
