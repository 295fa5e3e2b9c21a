"""Frames over a connection: however the bytes arrive, and however slowly the peer reads."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
import uvloop

from tandem.rpc.framed_connection import LENGTH_BYTES, FramedConnection, FrameError

LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await main

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(bounded())


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)


class Recorder:
    """A handler that sends what is in `waiting` and keeps what it is told."""

    def __init__(self, *waiting: bytes) -> None:
        self.waiting = deque(waiting)
        self.frames: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.fails_at: bytes | None = None

    def next_frame(self) -> bytes | None:
        return self.waiting.popleft() if self.waiting else None

    def on_frame(self, frame: bytes) -> None:
        if frame == self.fails_at:
            raise ValueError(frame.decode())
        self.frames.append(frame)

    def on_lost(self, error: Exception | None) -> None:
        self.ends.append(error)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self, connection: FramedConnection, *, pauses_at: int = 1 << 40) -> None:
        self.writes: list[bytes] = []
        self.ended = ""
        self._connection = connection
        self._pauses_at = pauses_at
        connection.connection_made(self)

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        if sum(map(len, self.writes)) >= self._pauses_at:
            self._connection.pause_writing()

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    def close(self) -> None:
        self.ended = self.ended or "closed"


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_framed_connection_frames_survive_any_split() -> None:
    rng = Random(5)
    for _ in range(200):
        frames = [rng.randbytes(rng.choice([1, 2, 3, 4, 5, 100, 5000])) for _ in range(rng.randrange(1, 9))]
        handler = Recorder()
        connection = FramedConnection(handler)
        Wire(connection)
        left = framed(*frames)
        while left:
            size = rng.choice([1, 2, 3, 4, 7, 100, 4096, len(left)])
            connection.data_received(left[:size])
            left = left[size:]
        assert handler.frames == frames
        assert handler.ends == []


async def test_framed_connection_frame_beyond_bound_ends_it_before_it_is_kept() -> None:
    handler = Recorder()
    connection = FramedConnection(handler, max_frame_bytes=10)
    wire = Wire(connection)
    connection.data_received(framed(b"x" * 10) + (11).to_bytes(LENGTH_BYTES, "little"))
    assert handler.frames == [b"x" * 10]
    (error,) = handler.ends
    assert isinstance(error, FrameError)
    assert "11 bytes" in str(error)
    assert wire.ended == "aborted"
    connection.data_received(framed(b"late"))
    connection.connection_lost(None)
    assert (len(handler.frames), len(handler.ends)) == (1, 1)


async def test_framed_connection_failing_handler_gets_no_further_frame() -> None:
    handler = Recorder()
    handler.fails_at = b"bad"
    connection = FramedConnection(handler)
    wire = Wire(connection)
    connection.data_received(framed(b"good", b"bad", b"good"))
    assert handler.frames == [b"good"]
    assert [str(error) for error in handler.ends] == ["bad"]
    assert connection.lost.is_set()
    assert wire.ended == "aborted"


async def test_framed_connection_new_handler_gets_next_frame() -> None:
    after = Recorder()

    class First(Recorder):
        def on_frame(self, frame: bytes) -> None:
            connection.handler = after

    connection = FramedConnection(First())
    Wire(connection)
    connection.data_received(framed(b"ticket", b"order", b"order 2"))
    assert after.frames == [b"order", b"order 2"]


async def test_framed_connection_frames_of_one_turn_are_one_write() -> None:
    handler = Recorder()
    connection = FramedConnection(handler)
    wire = Wire(connection)
    for frame in (b"a", b"bb", b"c"):
        handler.waiting.append(frame)
        connection.wake()
    assert wire.writes == []
    await turn()
    assert wire.writes == [framed(b"a", b"bb", b"c")]


async def test_framed_connection_asks_for_nothing_while_peer_does_not_read() -> None:
    handler = Recorder(b"1", b"2")
    connection = FramedConnection(handler)
    wire = Wire(connection, pauses_at=1)
    await turn()
    handler.waiting.extend([b"3", b"4"])
    connection.wake()
    await turn()
    assert list(handler.waiting) == [b"3", b"4"]
    connection.resume_writing()
    await turn()
    assert b"".join(wire.writes) == framed(b"1", b"2", b"3", b"4")


async def test_framed_connection_finish_waits_for_what_peer_has_not_read() -> None:
    handler = Recorder(b"1")
    connection = FramedConnection(handler)
    wire = Wire(connection, pauses_at=1)
    await turn()
    handler.waiting.append(b"2")
    connection.finish()
    await turn()
    assert wire.ended == ""
    wire._pauses_at = 1 << 40
    connection.resume_writing()
    await turn()
    assert (b"".join(wire.writes), wire.ended) == (framed(b"1", b"2", b""), "")
    connection.connection_lost(None)
    assert handler.ends == [None]


async def test_framed_connection_end_of_finished_peer_differs_from_its_death() -> None:
    for last, expected in ((b"", []), (framed(b""), [None]), (framed(b"1")[:-1], [])):
        handler = Recorder()
        connection = FramedConnection(handler)
        wire = Wire(connection)
        if last:
            connection.data_received(last)
        assert handler.ends == expected
        assert wire.ended == ("aborted" if expected else "")
        connection.connection_lost(None)
        if not expected:
            assert [str(error) for error in handler.ends] == ["the peer is gone"]
        assert len(handler.ends) == 1


async def test_framed_connection_abort_is_no_error() -> None:
    handler = Recorder()
    connection = FramedConnection(handler)
    Wire(connection)
    connection.abort()
    connection.connection_lost(None)
    assert handler.ends == [None]


async def test_framed_connection_handlers_oserror_is_not_the_networks() -> None:
    class Failing(Recorder):
        def on_frame(self, frame: bytes) -> None:
            raise FileNotFoundError("no such file")

        def next_frame(self) -> bytes | None:
            raise FileNotFoundError("no such file")

    handler = Failing()
    connection = FramedConnection(handler)
    Wire(connection)
    connection.data_received(framed(b"x"))
    other = Failing()
    Wire(FramedConnection(other))
    await turn()
    assert (len(handler.ends), len(other.ends)) == (1, 1)
    for error in (*handler.ends, *other.ends):
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, FileNotFoundError)


async def test_framed_connection_yields_between_large_writes() -> None:
    handler = Recorder(*[bytes(200_000)] * 20)
    connection = FramedConnection(handler)
    wire = Wire(connection)
    await asyncio.sleep(0)
    assert (len(wire.writes), len(handler.waiting)) == (4, 12)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not handler.waiting


@LOOPS
def test_framed_connection_over_sockets_bounds_what_waits_for_slow_peer(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """2,000 frames of 64 KB: until the peer reads, all but a few stay with the handler. Then all arrive, in order."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sender = Recorder(*(bytes([number % 251]) * 65_536 for number in range(2_000)))
        reader = Recorder()
        reading: list[FramedConnection] = []
        has_all = asyncio.Event()

        def on_frame(frame: bytes) -> None:
            reader.frames.append(frame[:1])
            if len(reader.frames) == 2_000:
                has_all.set()

        reader.on_frame = on_frame  # type: ignore[method-assign]

        def accept() -> FramedConnection:
            reading.append(FramedConnection(reader))
            return reading[0]

        server = await loop.create_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await loop.create_connection(lambda: FramedConnection(sender), "127.0.0.1", port)
        while not reading or not reading[0].was_open:  # noqa: ASYNC110 - a connection tells nobody
            await asyncio.sleep(0)
        reading[0]._transport.pause_reading()
        num_left = -1
        while num_left != len(sender.waiting):
            num_left = len(sender.waiting)
            await asyncio.sleep(0.05)
        assert num_left > 1_700, "as much as the sockets hold, 16 MB at most"
        reading[0]._transport.resume_reading()
        await has_all.wait()
        assert reader.frames == [bytes([number % 251]) for number in range(2_000)]
        reading[0].abort()
        server.close()

    run(make_loop, main())


@LOOPS
def test_framed_connection_over_sockets_end_reaches_both_sides(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        here, there = Recorder(b"last words"), Recorder()
        accepted: list[FramedConnection] = []

        def accept() -> FramedConnection:
            accepted.append(FramedConnection(there))
            return accepted[-1]

        server = await loop.create_server(accept, "127.0.0.1", 0)
        connection = FramedConnection(here)
        await loop.create_connection(lambda: connection, "127.0.0.1", server.sockets[0].getsockname()[1])
        connection.finish()
        await connection.lost.wait()
        while not accepted:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        await accepted[0].lost.wait()
        assert there.frames == [b"last words"]
        assert (here.ends, there.ends) == ([None], [None])
        server.close()

    run(make_loop, main())
