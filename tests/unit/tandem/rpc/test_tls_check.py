"""What a handshake shows of a peer, and when a permissive process speaks in the clear because of it."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.cluster_grpc import ClusterChannels
from tandem.rpc.health import HEALTH_METHOD
from tandem.rpc.mutual_tls import MEMBER_NAME
from tandem.rpc.tls_check import TlsCheck, check_peer
from tests.support.certificates import Authority

HANDSHAKE = 0x16
ALERT = bytes([21, 3, 3, 0, 2, 2, 40])
"""A fatal one: handshake_failure."""
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Peer:
    """Reads what a connection begins with, says something, and hangs up: with a reset, or in order."""

    def __init__(self, says: bytes, *, resets: bool) -> None:
        self._says = says
        self._resets = resets
        self.first_bytes: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.first_bytes += (await reader.read(1))[:1]
        writer.write(self._says)
        sock = writer.get_extra_info("socket")
        if self._resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


@asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[str]:
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(scope="module")
def permissive(tmp_path_factory: pytest.TempPathFactory) -> ClusterCredentials:
    folder: Path = tmp_path_factory.mktemp("own")
    return ClusterCredentials(Authority().issue(folder, name=MEMBER_NAME, setting="cluster.tls"), is_permissive=True)


@pytest.mark.parametrize("says", [HTTP2_SETTINGS, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_peer_that_answers_in_another_protocol_speaks_no_tls(permissive, says: bytes) -> None:
    async with listening(Peer(says, resets=False)) as address:
        found = await check_peer(address, permissive)
    assert found == TlsCheck(speaks_tls=False, mismatch="the peer does not use TLS, but cluster.tls is on here")


@pytest.mark.parametrize("resets", [True, False])
async def test_peer_that_hangs_up_may_speak_tls(permissive, resets: bool) -> None:
    async with listening(Peer(b"", resets=resets)) as address:
        assert await check_peer(address, permissive) == TlsCheck()


async def test_peer_that_breaks_the_handshake_off_may_speak_tls(permissive) -> None:
    async with listening(Peer(ALERT, resets=False)) as address:
        found = await check_peer(address, permissive)
    assert found.speaks_tls is None
    assert found.mismatch is not None
    assert found.mismatch.startswith("the handshake failed: ")


@pytest.mark.parametrize(("says", "resets"), [(b"", True), (b"", False), (ALERT, False)])
async def test_permissive_process_sends_nothing_in_the_clear_to_a_peer_that_hangs_up(permissive, says, resets) -> None:
    peer = Peer(says, resets=resets)
    async with listening(peer) as address, ClusterChannels(permissive).open(address) as channel:
        call = channel.unary_unary(HEALTH_METHOD)(b"", timeout=10, metadata=(("token", "secret"),))
        await asyncio.wait([asyncio.ensure_future(call.code())])
        assert len(peer.first_bytes) > 1
        assert set(peer.first_bytes) == {HANDSHAKE}


async def test_address_that_is_none_is_not_reached(permissive) -> None:
    assert await check_peer("nowhere", permissive) == TlsCheck()
