"""Credentials of `cluster.tls`: accepted peers, live rotation, and messages about invalid files."""

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cluster.authority import create_member_bundle
from tandem.config.cluster_tls import ClusterTls
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import ClusterCredentials, open_credentials
from tandem.rpc.cluster_grpc import (
    ClusterAuth,
    ClusterChannels,
    make_server,
    open_blocking_channel,
    open_port,
    serve_health,
)
from tandem.rpc.health import HEALTH_METHOD, SERVING, health_handler
from tandem.rpc.mutual_tls import MEMBER_NAME, MutualTls, TlsFiles
from tandem.rpc.tls_check import TlsCheck, check_peer
from tests.support.certificates import Authority

YESTERDAY = datetime.now(UTC) - timedelta(days=1)
Make = Callable[..., TlsFiles]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def foreign() -> Authority:
    return Authority()


@pytest.fixture
def issue(tmp_path: Path) -> Make:
    def make(authority: Authority, folder: str = "own", **details) -> TlsFiles:
        (tmp_path / folder).mkdir(exist_ok=True)
        name = details.pop("name", MEMBER_NAME)
        return authority.issue(tmp_path / folder, name=name, setting="cluster.tls", **details)

    return make


@asynccontextmanager
async def serving(credentials: ClusterCredentials | None) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        server = make_server(ClusterAuth(b"s" * 16))
        server.add_generic_rpc_handlers((health_handler(lambda: True),))
        port = await open_port(stack, server, "127.0.0.1", 0, credentials)
        await server.start()
        stack.push_async_callback(server.stop, None)
        yield f"127.0.0.1:{port}"


async def is_served(channels: ClusterChannels, address: str) -> bool:
    try:
        async with channels.open(address) as channel:
            return await channel.unary_unary(HEALTH_METHOD)(b"", timeout=10) == SERVING
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        # A handshake finds out why, and asyncio leaves a connection open whose server closes while it is accepted.
        await asyncio.gather(*channels._checks.values())
        return False


async def test_members_with_different_certificates_serve_each_other(authority: Authority, issue: Make) -> None:
    one, other = ClusterCredentials(issue(authority)), ClusterCredentials(issue(authority, "other"))
    async with serving(one) as address:
        assert await is_served(ClusterChannels(other), address)
        assert await check_peer(address, other) == TlsCheck(speaks_tls=True, not_after_s=one.not_after_s)
        with open_blocking_channel(address, other) as channel:
            assert await asyncio.to_thread(channel.unary_unary(HEALTH_METHOD), b"", 10) == SERVING


@asynccontextmanager
async def serving_with_invalid_certificate(files: TlsFiles) -> AsyncIterator[str]:
    """A server with a certificate that start-up would refuse, such as an expired one."""
    config = grpc.ssl_server_certificate_configuration([(files.key.read_bytes(), files.cert.read_bytes())])
    server = make_server(ClusterAuth(b"s" * 16))
    port = server.add_secure_port("127.0.0.1:0", grpc.dynamic_ssl_server_credentials(config, lambda: None, False))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def assert_refused(address: str, client: ClusterCredentials | None, reason: str, logs: pytest.LogCaptureFixture):
    channels = ClusterChannels(client)
    for _ in range(2):
        assert not await is_served(channels, address)
    told = [record.message for record in logs.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert told[0].startswith(f"no connection with {address}: {reason}")


async def test_plain_client_is_refused(authority: Authority, issue: Make, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ClusterCredentials(issue(authority))) as address:
        await assert_refused(address, None, "the peer accepts only TLS, and this process has no certificates", caplog)


async def test_plain_server_is_refused(authority: Authority, issue: Make, caplog: pytest.LogCaptureFixture) -> None:
    client = ClusterCredentials(issue(authority))
    async with serving(None) as address:
        await assert_refused(address, client, "the peer does not use TLS, but cluster.tls is on here", caplog)


async def test_server_of_another_ca_is_refused(
    authority: Authority, foreign: Authority, issue: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = ClusterCredentials(issue(authority))
    async with serving(ClusterCredentials(issue(foreign, "foreign"))) as address:
        await assert_refused(address, client, "the peer's certificate is refused: unable to get local issuer", caplog)


async def test_client_of_another_ca_is_refused(
    authority: Authority, foreign: Authority, issue: Make, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = issue(authority), issue(foreign, "foreign")
    other.ca.write_bytes(other.ca.read_bytes() + own.ca.read_bytes())  # trusts both
    async with serving(ClusterCredentials(own)) as address:
        await assert_refused(address, ClusterCredentials(other), "the peer refuses this process's certificate", caplog)


@pytest.mark.parametrize(
    ("details", "reason"),
    [({"not_after": YESTERDAY}, "certificate has expired"), ({"name": "worker.internal"}, "Hostname mismatch")],
)
async def test_server_with_wrong_certificate_of_the_right_ca_is_refused(
    details, reason: str, authority: Authority, issue: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = ClusterCredentials(issue(authority))
    async with serving_with_invalid_certificate(issue(authority, "wrong", **details)) as address:
        await assert_refused(address, client, f"the peer's certificate is refused: {reason}", caplog)


@pytest.mark.parametrize(
    ("details", "reason"),
    [({"not_after": YESTERDAY}, "certificate has expired"), ({"name": "worker.internal"}, "Hostname mismatch")],
)
def test_credentials_invalid_certificate_is_refused_at_start(details, reason, authority, issue: Make) -> None:
    files = issue(authority, **details)
    with pytest.raises(ConfigError, match=f"cluster.tls.cert: {files.cert} is not good for {files.ca}: {reason}"):
        ClusterCredentials(files)


async def test_unreachable_peer_is_not_blamed_on_tls(authority, issue: Make, caplog) -> None:
    async with serving(None) as address:
        pass
    channels = ClusterChannels(ClusterCredentials(issue(authority)))
    assert not await is_served(channels, address)
    assert caplog.records == []


async def test_rotated_certificates_apply_to_new_connections(
    authority: Authority, foreign: Authority, issue: Make, caplog: pytest.LogCaptureFixture
) -> None:
    files, new = issue(authority), issue(foreign, "new")
    server, late = ClusterCredentials(files), ClusterCredentials(new)
    caplog.set_level(logging.INFO)
    async with serving(server) as address, ClusterChannels(ClusterCredentials(files)).open(address) as old:
        assert await old.unary_unary(HEALTH_METHOD)(b"", timeout=10) == SERVING
        assert not await is_served(ClusterChannels(late), address)
        for name in ("ca", "key", "cert"):
            shutil.copy(getattr(new, name), getattr(files, name))
        assert await is_served(ClusterChannels(late), address)
        assert await old.unary_unary(HEALTH_METHOD)(b"", timeout=10) == SERVING
    assert any("new certificates of cluster.tls are in force" in record.message for record in caplog.records)


async def test_rotation_rejects_invalid_certificates(authority, issue: Make, caplog: pytest.LogCaptureFixture) -> None:
    files = issue(authority)
    server, client = ClusterCredentials(files), ClusterCredentials(issue(authority, "other"))
    async with serving(server) as address:
        files.key.write_text("no key")
        assert await is_served(ClusterChannels(client), address)
    [told] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert told.startswith("cluster.tls.key: ")
    assert told.endswith("the previous certificates stay in force for sessions and hand-offs")


async def test_plain_sockets_use_rotated_certificates(authority, foreign, issue: Make) -> None:
    """What asyncio's connections get from the same settings."""
    files, new = issue(authority), issue(foreign, "new")
    credentials = ClusterCredentials(files)

    async def ping() -> None:
        context = credentials.client_context()
        reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=MEMBER_NAME)
        assert await reader.read(4) == b"pong"
        writer.close()
        await writer.wait_closed()

    closed = asyncio.Event()

    async def pong(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"pong")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        closed.set()

    context = MutualTls(new, name=MEMBER_NAME).server
    async with await asyncio.start_server(pong, "127.0.0.1", 0, ssl=context) as server:
        address = server.sockets[0].getsockname()
        with pytest.raises(ssl.SSLCertVerificationError):
            await ping()
        for name in ("ca", "key", "cert"):
            shutil.copy(getattr(new, name), getattr(files, name))
        await ping()
        await closed.wait()


async def test_permissive_mode_talks_to_tls_and_plain_peers(authority, issue: Make) -> None:
    strict = ClusterCredentials(issue(authority))
    permissive = ClusterCredentials(issue(authority, "other"), is_permissive=True)
    async with serving(permissive) as mixed, serving(strict) as closed, serving(None) as plain:
        for client in (None, strict, permissive):
            assert await is_served(ClusterChannels(client), mixed)
        for address in (closed, plain):
            assert await is_served(ClusterChannels(permissive), address)
        with open_blocking_channel(mixed, permissive) as channel:
            assert await asyncio.to_thread(channel.unary_unary(HEALTH_METHOD), b"", 10) == SERVING


async def test_permissive_client_does_not_fall_back_on_bad_certificate(authority, foreign, issue: Make) -> None:
    permissive = ClusterCredentials(issue(authority), is_permissive=True)
    async with serving(ClusterCredentials(issue(foreign, "foreign"), is_permissive=True)) as address:
        assert not await is_served(ClusterChannels(permissive), address)


async def test_health_port_answers_without_tls(unused_tcp_port: int) -> None:
    takes_work = True
    async with AsyncExitStack() as stack:
        await serve_health(stack, "127.0.0.1", None, lambda: True)
        await serve_health(stack, "127.0.0.1", unused_tcp_port, lambda: takes_work)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
            check = channel.unary_unary(HEALTH_METHOD)
            assert await check(b"", timeout=10) == SERVING
            takes_work = False
            assert await check(b"", timeout=10) != SERVING


def test_credentials_from_pem_text_equal_files() -> None:
    text = create_member_bundle()
    credentials = open_credentials(ClusterTls(pem=text), ("10.0.0.2",))
    assert credentials is not None
    assert "PRIVATE KEY" in credentials.files.key.read_text()
    assert credentials.files.cert.read_text() + credentials.files.ca.read_text() in text


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_incomplete_pem_text_is_refused(cut: int) -> None:
    blocks = [f"-----BEGIN{one}" for one in create_member_bundle().split("-----BEGIN")[1:]]
    del blocks[cut]
    with pytest.raises(ConfigError, match=r"cluster\.tls\.pem must hold one private key, a certificate, and the CA's"):
        open_credentials(ClusterTls(pem="".join(blocks)), ())


def test_mode_off_beyond_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert open_credentials(ClusterTls(mode="off"), ("10.0.0.2",)) is None
    assert "not encrypted (cluster.tls: off)" in caplog.text


def test_credentials_expiry_is_that_of_certificate(authority: Authority, issue: Make) -> None:
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    assert ClusterCredentials(issue(authority, not_after=soon)).not_after_s == soon.timestamp()


async def test_channel_beyond_loopback_is_refused_in_the_clear_unless_tls_is_off(caplog) -> None:
    channels, far = ClusterChannels(None), "192.0.2.1:7001"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cluster\.tls: 192\.0\.2\.1 is beyond loopback"):
            async with channels.open(far):
                pass
    assert [one.message for one in caplog.records if "beyond loopback" in one.message] == [caplog.messages[0]]
    assert caplog.messages[0].startswith(f"no connection with {far}: cluster.tls: ")
    async with ClusterChannels(None, allows_plaintext=True).open(far) as channel:
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
    async with serving(None) as address:
        assert await is_served(channels, address)


async def test_channel_in_tls_may_lead_beyond_loopback(authority, issue: Make) -> None:
    async with ClusterChannels(ClusterCredentials(issue(authority))).open("192.0.2.1:7001") as channel:
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
