"""The port for peers with TLS and without: how many connections it takes, and what keeps it from listening."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem.rpc import mixed_port
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.cluster_grpc import ClusterAuth, make_server, open_port
from tandem.rpc.mixed_port import MixedPort
from tandem.rpc.mutual_tls import MEMBER_NAME
from tests.support.certificates import Authority


@pytest.fixture
def permissive(tmp_path: Path) -> ClusterCredentials:
    return ClusterCredentials(Authority().issue(tmp_path, name=MEMBER_NAME), is_permissive=True)


async def test_connections_beyond_the_bound_are_refused_and_logged_a_few_times(monkeypatch, caplog) -> None:
    monkeypatch.setattr(mixed_port, "MAX_RELAYS", 2)

    echoes: list[asyncio.Task[None] | None] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoes.append(asyncio.current_task())
        while data := await reader.read(100):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(MixedPort("127.0.0.1", 0))
        await stack.enter_async_context(await asyncio.start_unix_server(echo, port.plain_path))

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            stack.callback(writer.close)
            return reader, writer

        async def is_served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            try:
                writer.write(b"ping")
                return await reader.read(4) == b"ping"
            except ConnectionResetError:
                return False

        served = [await connect() for _ in range(2)]
        assert [await is_served(*one) for one in served] == [True, True]
        for _ in range(20):
            assert not await is_served(*await connect())
        assert [await is_served(*one) for one in served] == [True, True]
        served[0][1].close()
        while len(port._relays) > 1:  # noqa: ASYNC110 - the port tells nobody
            await asyncio.sleep(0.001)
        assert await is_served(*await connect())
        for _, writer in served:
            writer.close()
    await asyncio.gather(*filter(None, echoes))
    assert 1 <= len(caplog.records) <= 11
    assert caplog.messages[0] == "permissive port: a connection was refused: 2 are open"


async def test_folder_that_is_too_long_for_sockets_is_an_error_that_names_tmpdir(
    tmp_path: Path, monkeypatch, permissive: ClusterCredentials
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with AsyncExitStack() as stack:
        with pytest.raises(OSError, match=r"is longer than the 107 bytes .*: set TMPDIR to a shorter one"):
            await open_port(stack, make_server(ClusterAuth(b"s" * 16)), "127.0.0.1", 0, permissive)
    assert list(deep.iterdir()) == []


class Deaf:
    """A gRPC server that binds TCP only."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def add_insecure_port(self, _address: str) -> int:
        if self._error is not None:
            raise self._error
        return 0


@pytest.mark.parametrize("error", [RuntimeError("Failed to bind to address"), None])
async def test_socket_behind_the_port_that_cannot_be_bound_is_an_os_error(error, permissive) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(OSError, match=r"cannot listen on unix:.*/plain"):
            await open_port(stack, Deaf(error), "127.0.0.1", 0, permissive)
