"""Both servers over TLS: accepted clients, rotated certificates, and files refused at start."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from router.access.access_files import AccessControl
from router.access.tls import read_identity
from router.access.watched_files import FileWatcher
from router.grpc.server import GrpcServer, build_server
from router.http.app import create_app
from router.http.server.connection_limits import ConnectionLimits
from router.http.server.http_server import HttpServer
from tandem.config.access import RouterTls
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.certificates import Authority
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import events

WAIT_S = 20.0
LOCAL = "127.0.0.1"
LIMITS = ConnectionLimits(most=8, head_timeout_s=WAIT_S, keep_alive_s=WAIT_S, write_timeout_s=WAIT_S)

EXPIRED_AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBHjCBxqADAgECAgEBMAoGCCqGSM49BAMCMA8xDTALBgNVBAMMBHBhc3QwHhcN
MDEwMTAxMDAwMDAwWhcNMDIwMTAxMDAwMDAwWjAPMQ0wCwYDVQQDDARwYXN0MFkw
EwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEA3dg5wS7hb7/h0NVDmXSAykNfHue/6cY
3kF8U0gZ2uV8YkcScsLhQmzHMnz8tF/D4bK7HSeO8iyqV/MqJ1uzC6MTMBEwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiAYTBs8/wyD5+hw+lhRtOLP
qgLEbySuWFw+EchEkL1uyAIgOTH9PNpjIK+SSCSp8Japqng3b4nBZ+i0IE1toe1P
Vh4=
-----END CERTIFICATE-----
"""
"""Of the year 2001."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> RouterTls:
    files = authority.issue(tmp_path, name=LOCAL)
    return RouterTls(cert=str(files.cert), key=str(files.key))


@asynccontextmanager
async def opened(
    tls: RouterTls, limits: ConnectionLimits = LIMITS
) -> AsyncIterator[tuple[AccessControl, HttpServer, GrpcServer]]:
    config = RouterConfig(tls=tls)
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    parts.say("hello world")
    async with AccessControl(config) as keeper:
        app = create_app(parts.frontend, parts.generator, parts.ready, config, parts.metrics, access=keeper)
        server = build_server(parts.frontend, parts.generator, config, parts.metrics, keeper=keeper)
        http = HttpServer(app, host=LOCAL, port=0, grace_s=1.0, limits=limits, tls=keeper.tls)
        async with http, GrpcServer(server, host=LOCAL, port=0, grace_s=1.0, tls=keeper.tls) as rpc:
            yield keeper, http, rpc


def trusting(folder: Path, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if client is not None:
        context.load_cert_chain(client / "cert.pem", client / "key.pem")
    return context


def https_client(port: int, context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://{LOCAL}:{port}", verify=context, trust_env=False, timeout=WAIT_S)


async def models(port: int, folder: Path, client: Path | None = None) -> list[str]:
    """Return the models that are listed over gRPC."""
    own = () if client is None else ((client / "key.pem").read_bytes(), (client / "cert.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *own)
    # A channel of its own: gRPC would otherwise use another's connection.
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.secure_channel(f"{LOCAL}:{port}", credentials, options) as channel:
        answer = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=WAIT_S)
        return [model.id for model in answer.models]


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


async def looked(keeper: AccessControl) -> None:
    await next(one for one in keeper._collectors if isinstance(one, FileWatcher)).check()


async def shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection sees."""
    _, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def test_tls_servers_answer_and_stream(tls: RouterTls, tmp_path: Path) -> None:
    async with opened(tls) as (_, http, rpc):
        async with https_client(http.port, trusting(tmp_path)) as client:
            for _ in range(3):
                assert (await client.get("/v1/models")).status_code == 200
            stream = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            pieces = [one["choices"][0]["text"] for one in events(stream.text)]
            assert "".join(pieces) == "hello world"
        assert await models(rpc.port, tmp_path) == [fakes.MODEL]


async def test_tls_request_sent_with_handshake_is_answered(tls: RouterTls, tmp_path: Path) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    context = trusting(tmp_path)

    def exchange(port: int) -> bytes:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = context.wrap_bio(incoming, outgoing, server_hostname=LOCAL)
        with socket.create_connection((LOCAL, port), WAIT_S) as sock:
            while True:
                try:
                    end.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    incoming.write(sock.recv(1 << 16))
            end.write(ask)
            # The end of the handshake and the request in one segment.
            sock.sendall(outgoing.read())
            while True:
                try:
                    return end.read(1 << 16)
                except ssl.SSLWantReadError:
                    incoming.write(sock.recv(1 << 16))

    async with opened(tls) as (_, http, _rpc):
        for _ in range(20):
            assert (await asyncio.to_thread(exchange, http.port)).startswith(b"HTTP/1.1 200")


async def test_tls_plaintext_or_old_version_is_refused(tls: RouterTls, tmp_path: Path) -> None:
    async with opened(tls) as (_, http, rpc):
        reader, writer = await asyncio.open_connection(LOCAL, http.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = await reader.read()
        assert b"HTTP/1.1" not in received
        writer.close()
        old = trusting(tmp_path)
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(http.port, old)
        with pytest.raises(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(f"{LOCAL}:{rpc.port}") as channel:
                await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=WAIT_S)
        assert await models(rpc.port, tmp_path) == [fakes.MODEL]


async def test_tls_renewed_certificates_apply_to_new_connections(
    tls: RouterTls, authority: Authority, tmp_path: Path
) -> None:
    other_folder = tmp_path / "stranger"
    other_folder.mkdir()
    old = trusting(tmp_path)
    async with opened(tls) as (keeper, http, rpc), https_client(http.port, old) as kept:
        assert (await kept.get("/v1/models")).status_code == 200
        first = await shown(http.port, old)
        authority.issue(tmp_path, name=LOCAL)
        await looked(keeper)
        second = await shown(http.port, old)
        assert second != first
        assert await models(rpc.port, tmp_path) == [fakes.MODEL]
        # Half of a change, and then nonsense: what was there stays.
        write(tls.key, authority.issue(other_folder, name=LOCAL).key.read_text())
        await looked(keeper)
        assert await shown(http.port, old) == second
        write(tls.cert, "no certificate")
        await looked(keeper)
        assert await shown(http.port, old) == second
        # Of another authority altogether.
        other = Authority().issue(tmp_path, name=LOCAL)
        await looked(keeper)
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(http.port, old)
        assert await shown(http.port, trusting(other.ca.parent)) != second
        assert await models(rpc.port, tmp_path) == [fakes.MODEL]
        assert (await kept.get("/v1/models")).status_code == 200


async def test_tls_client_authority_refuses_other_clients(tls: RouterTls, authority: Authority, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, issuer in ((one, authority), (other, Authority())):
        folder.mkdir()
        issuer.issue(folder, name="client")
    both = tmp_path / "clients.pem"
    both.write_text((one / "ca.pem").read_text())
    with_client_ca = tls.model_copy(update={"client_ca": str(both)})

    async def served(client: Path | None) -> list[bool]:
        found = []
        try:
            async with https_client(http.port, trusting(tmp_path, client)) as made:
                found.append((await made.get("/v1/models")).status_code == 200)
        except httpx.TransportError:
            found.append(False)
        try:
            found.append(await models(rpc.port, tmp_path, client) == [fakes.MODEL])
        except grpc.aio.AioRpcError:
            found.append(False)
        return found

    async with opened(with_client_ca) as (keeper, http, rpc):
        assert [await served(client) for client in (None, one, other)] == [[False] * 2, [True] * 2, [False] * 2]
        both.write_text((other / "ca.pem").read_text())
        await looked(keeper)
        assert [await served(client) for client in (None, one, other)] == [[False] * 2, [False] * 2, [True] * 2]


async def test_tls_handshakes_are_bounded_in_time_and_number(tls: RouterTls, tmp_path: Path) -> None:
    limits = ConnectionLimits(most=2, head_timeout_s=1.0, keep_alive_s=WAIT_S, write_timeout_s=WAIT_S)
    async with opened(tls, limits) as (_, http, _rpc):
        silent = [await asyncio.open_connection(LOCAL, http.port) for _ in range(4)]
        # Two had no room, two have said nothing in time.
        for reader, _ in silent:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
        async with https_client(http.port, trusting(tmp_path)) as client:
            assert (await client.get("/v1/models")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_tls_handshakes_and_connections_are_bounded_together(tls: RouterTls, tmp_path: Path) -> None:
    limits = ConnectionLimits(most=4, head_timeout_s=WAIT_S, keep_alive_s=WAIT_S, write_timeout_s=WAIT_S)
    async with opened(tls, limits) as (_, http, _rpc), asyncio.timeout(WAIT_S):
        clients = [await asyncio.open_connection(LOCAL, http.port, ssl=trusting(tmp_path)) for _ in range(4)]
        clients += [await asyncio.open_connection(LOCAL, http.port) for _ in range(4)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in clients]
        while sum(one.done() for one in ended) < 4:
            await asyncio.wait([one for one in ended if not one.done()], return_when=asyncio.FIRST_COMPLETED)
        # The silent ones in their turn make no way for more of them.
        extra = await asyncio.open_connection(LOCAL, http.port)
        with contextlib.suppress(ConnectionError):
            assert await extra[0].read() == b""
        assert sum(one.done() for one in ended) == 4
        for _, writer in [*clients, extra]:
            writer.close()
        await asyncio.gather(*ended, return_exceptions=True)


@pytest.mark.parametrize("what", ["expired", "mismatch", "no key", "no cert", "no ca", "ca of the past", "absent"])
def test_tls_untrustworthy_files_are_refused_at_start(what: str, authority: Authority, tmp_path: Path) -> None:
    past = datetime.now(UTC) - timedelta(days=1)
    files = authority.issue(tmp_path, name=LOCAL, not_after=past if what == "expired" else None)
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "ca2.pem").write_text("nothing")
    (tmp_path / "ca3.pem").write_text(EXPIRED_AUTHORITY)
    changed = {
        "expired": ({}, "router.tls.cert: .*certificate has expired"),
        "mismatch": ({"key": authority.issue(other, name=LOCAL).key}, "is not the key of"),
        "no key": ({"key": files.ca}, "router.tls.key: .*no private key"),
        "no cert": ({"cert": tmp_path / "ca2.pem"}, "router.tls.cert: .*no certificate in PEM"),
        "no ca": ({"client_ca": tmp_path / "ca2.pem"}, "router.tls.client_ca: .*no certificates"),
        "ca of the past": ({"client_ca": tmp_path / "ca3.pem"}, "router.tls.client_ca: .*no client could connect"),
        "absent": ({"key": tmp_path / "absent"}, "router.tls.key: .*No such file"),
    }
    update, message = changed[what]
    made = RouterTls.model_validate(
        {"cert": str(files.cert), "key": str(files.key)} | {name: str(path) for name, path in update.items()}
    )
    with pytest.raises(ConfigError, match=message):
        read_identity(made)
