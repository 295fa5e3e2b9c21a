"""A worker's direct port: who gets in, and how it closes."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tandem.protocol.session_versions import DIRECT_TICKET_BYTES
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.framed_connection import LENGTH_BYTES, FramedConnection
from tandem.rpc.mutual_tls import MEMBER_NAME
from tests.support.certificates import Authority
from tests.unit.tandem.rpc.test_framed_connection import LOOPS, Recorder, framed, run
from worker import direct_port
from worker.direct_port import DirectPort, open_direct_port

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class Guest:
    """The other end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, *frames: bytes) -> None:
        self._writer.write(framed(*frames))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> bytes:
        """The next frame; b"" when the worker has hung up."""
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return b""

    def leave(self) -> None:
        self._writer.transport.abort()


class Guests:
    """Connections to a port, closed with their block at the latest."""

    def __init__(self, port: DirectPort) -> None:
        self.port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def come(self, tls: ssl.SSLContext | None = None) -> Guest:
        name = None if tls is None else MEMBER_NAME
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port.port, ssl=tls, server_hostname=name)
        self._writers.append(writer)
        return Guest(reader, writer)

    async def __aenter__(self) -> "Guests":
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


@asynccontextmanager
async def opened(credentials: ClusterCredentials | None = None) -> AsyncIterator[Guests]:
    async with DirectPort("127.0.0.1", credentials) as port, Guests(port) as guests:
        yield guests


class Session(Recorder):
    """Answers each frame with the same."""

    connection: FramedConnection

    def start(self, connection: FramedConnection) -> "Session":
        self.connection = connection
        return self

    def on_frame(self, frame: bytes) -> None:
        super().on_frame(frame)
        self.waiting.append(frame)
        self.connection.wake()


@LOOPS
def test_direct_port_ticket_is_good_for_one_connection(make_loop: MakeLoop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with opened() as guests:
            session = Session()
            ticket = guests.port.offer(session.start)
            guest = await guests.come()
            guest.say(ticket, b"with the ticket", b"x" * 100_000)
            assert await guest.hear() == b"with the ticket"
            assert len(await guest.hear()) == 100_000
            other = await guests.come()
            other.say(ticket)
            assert await other.hear() == b""
            guest.say(b"still here")
            assert await guest.hear() == b"still here"
            guest.leave()
            await session.connection.lost.wait()
            assert len(session.ends) == 1

    run(make_loop, main())
    assert "its ticket is unknown, or was used" in caplog.text


@LOOPS
@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (framed(b"\0" * DIRECT_TICKET_BYTES), "unknown"),
        (framed(b""), "hung up"),
        (framed(b"x" * 17), "17 bytes"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "bytes"),
        (b"\x10", "the peer is gone"),
        (b"", "the peer is gone"),
    ],
)
def test_direct_port_refuses_strangers(
    make_loop: MakeLoop, says: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with opened() as guests:
            guests.port.offer(Session().start)
            guest = await guests.come()
            guest.write(says)
            if reason == "the peer is gone":
                await asyncio.sleep(0)
                guest._writer.close()
            assert await guest.hear() == b""
            while guests.port._connections:  # noqa: ASYNC110 - the port tells nobody
                await asyncio.sleep(0.001)
            assert guests.port._num_unknown == 0

    run(make_loop, main())
    assert reason in caplog.text


@LOOPS
def test_direct_port_waits_for_no_ticket_for_long(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(direct_port, "_TICKET_S", 0.05)

    async def main() -> None:
        async with opened() as guests:
            guests.port.offer(Session().start)
            guest = await guests.come()
            guest.write(b"\x10\0\0\0half a tick")
            assert await guest.hear() == b""

    run(make_loop, main())
    assert "no ticket within" in caplog.text


async def test_direct_port_bounds_connections_without_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_port, "MAX_UNKNOWN", 3)
    async with opened() as guests:
        session = Session()
        guest = await guests.come()
        guest.say(guests.port.offer(session.start), b"in")
        assert await guest.hear() == b"in"
        strangers = [await guests.come() for _ in range(3)]
        while guests.port._num_unknown < 3:  # noqa: ASYNC110 - the port tells nobody
            await asyncio.sleep(0.001)
        assert await (await guests.come()).hear() == b""
        guest.say(b"undisturbed")
        assert await guest.hear() == b"undisturbed"
        strangers[0].leave()
        while guests.port._num_unknown == 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        late = await guests.come()
        late.say(guests.port.offer(Session().start), b"in")
        assert await late.hear() == b"in"


async def test_direct_port_accepts_nobody_while_no_ticket_is_out() -> None:
    async with opened() as guests:
        guests.port.withdraw(guests.port.offer(Session().start))
        stranger = await guests.come()  # by the system
        stranger.say(bytes(DIRECT_TICKET_BYTES))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (guests.port._num_unknown, len(guests.port._connections)) == (0, 0)
        guests.port.offer(Session().start)
        assert await stranger.hear() == b"", "refused when its turn has come"


async def test_direct_port_takes_no_stranger_for_a_ticket_that_is_gone() -> None:
    async with opened() as guests:
        ticket = guests.port.offer(Session().start)
        for _ in range(20):
            await asyncio.sleep(0.001)
        guests.port.withdraw(ticket)
        stranger = await guests.come()
        assert await asyncio.wait_for(stranger.hear(), 2.0) == b"", "at once, not when he has shown no ticket"
        assert guests.port._num_unknown == 0


async def test_direct_port_withdrawn_ticket_is_worthless() -> None:
    async with opened() as guests:
        guests.port.offer(Session().start)
        ticket = guests.port.offer(Session().start)
        guests.port.withdraw(ticket)
        guests.port.withdraw(ticket)
        guest = await guests.come()
        guest.say(ticket)
        assert await guest.hear() == b""


@LOOPS
def test_direct_port_close_delivers_last_frames_of_finished_sessions(make_loop: MakeLoop) -> None:
    async def main() -> None:
        port = DirectPort("127.0.0.1", None)
        async with Guests(port) as guests:
            await _finish_one_of_two(port, guests)
            with pytest.raises(OSError, match=r"."):
                await guests.come()

    async def _finish_one_of_two(port: DirectPort, guests: Guests) -> None:
        async with port:
            finished, stuck = Session(), Session()
            guest, other = await guests.come(), await guests.come()
            guest.say(guests.port.offer(finished.start), b"hello")
            other.say(guests.port.offer(stuck.start), b"hello")
            assert [await guest.hear(), await other.hear()] == [b"hello", b"hello"]
            finished.waiting.extend([b"y" * 300_000, b"bye"])
            finished.connection.finish()
        assert [len(await guest.hear()), await guest.hear(), await guest.hear()] == [300_000, b"bye", b""]
        assert await guest.hear() == b"", "the end of frames, and then of the connection"
        assert await other.hear() == b"", "it was not finished, and is closed all the same"

    run(make_loop, main())


@LOOPS
def test_direct_port_with_tls_takes_members_only(make_loop: MakeLoop, tmp_path: Path) -> None:
    """Also those of a new authority, once its files are in place: each handshake uses the files as they are then."""
    files = Authority().issue(tmp_path, name=MEMBER_NAME)
    credentials = ClusterCredentials(files)
    (tmp_path / "other").mkdir()
    stranger = ClusterCredentials(Authority().issue(tmp_path / "other", name=MEMBER_NAME))

    async def is_served(guests: Guests, tls: ssl.SSLContext | None) -> bool:
        ticket = guests.port.offer(Session().start)
        try:
            guest = await guests.come(tls)
        except (OSError, ssl.SSLError):
            return False
        guest.say(ticket, b"in")
        return await guest.hear() == b"in"

    async def main() -> None:
        async with opened(credentials) as guests:
            assert await is_served(guests, credentials.client_context())
            assert not await is_served(guests, None)
            assert not await is_served(guests, stranger.client_context())
            former = credentials.client_context()
            Authority().issue(tmp_path, name=MEMBER_NAME)
            assert await is_served(guests, credentials.client_context())
            assert not await is_served(guests, former)

    run(make_loop, main())


async def test_direct_port_is_not_opened_by_permissive_worker(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, name=MEMBER_NAME)
    async with AsyncExitStack() as stack:
        assert await open_direct_port(stack, "127.0.0.1", ClusterCredentials(files, is_permissive=True)) is None
        opened = await open_direct_port(stack, "127.0.0.1", ClusterCredentials(files))
        assert opened is not None
        assert opened.port > 0


async def test_direct_port_on_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await DirectPort("192.0.2.1", None).__aenter__()
