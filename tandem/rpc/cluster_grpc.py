"""gRPC between processes of one cluster, and the connections beside it: authentication, TLS, keepalive, shutdown.

Peers prove that they belong to the cluster by a token derived from its secret; the secret itself never travels. With
`cluster.tls` they also show certificates (`tandem.rpc.cluster_credentials`).
"""

import asyncio
import hmac
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.health import HEALTH_METHOD, health_handler
from tandem.rpc.hosts import is_loopback, keep_alive, split
from tandem.rpc.mixed_port import MixedPort
from tandem.rpc.mutual_tls import MEMBER_NAME
from tandem.rpc.tls_check import check_peer

TOKEN_KEY = "tandem-cluster-token"  # noqa: S105  # the header's name
MAX_MESSAGE_BYTES = 32 << 20
_MOST_CONNECTIONS = 1 << 16

# Names as in gRPC core's channel_arg_names.h: a misspelt key is ignored in silence.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Whoever has not said by then that it speaks HTTP/2, or TLS, is closed; gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", 15_000),
    # Two servers must never share a port by accident: the second one fails at once.
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # While a ping that measures bandwidth is unanswered no keepalive ping is sent, and gRPC would wait a minute for it.
    ("grpc.http2.ping_timeout_ms", 12_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A worker that comes back should be found within a second, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)

_log = logging.getLogger(__name__)
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ClusterAuth(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Admits callers that know the cluster's secret, and authenticates outgoing calls."""

    def __init__(self, secret: bytes) -> None:
        self._token = hmac.digest(secret, b"tandem rpc v1", "sha256").hex()
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    def client_metadata(self) -> Sequence[tuple[str, str]]:
        """Metadata that a caller sends with every call."""
        return ((TOKEN_KEY, self._token),)

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Pass a call on, or answer UNAUTHENTICATED without reading its messages. Health checks are public."""
        if details.method == HEALTH_METHOD:
            return await continuation(details)
        given = next((value for key, value in details.invocation_metadata or () if key == TOKEN_KEY), "")
        if isinstance(given, str) and hmac.compare_digest(given.encode(), self._token.encode()):
            return await continuation(details)
        return self._refusal


async def _refuse(_request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{TOKEN_KEY} is missing or wrong: not of this cluster")


ChannelOpener = Callable[[str], AbstractAsyncContextManager[grpc.aio.Channel]]
"""Opens a channel to the process at host:port, for as long as the context is entered."""


class ClusterChannels:
    """Opens channels to other processes of the cluster; `open` is a ChannelOpener."""

    def __init__(self, credentials: ClusterCredentials | None, *, allows_plaintext: bool = False) -> None:
        """`credentials`: None for channels in the clear. `allows_plaintext`: these may lead beyond loopback
        (`cluster.tls: off`)."""
        self._credentials = credentials
        self._allows_plaintext = allows_plaintext
        self._logged: dict[str, str] = {}
        """What was logged last about each peer that TLS keeps this process from."""
        self._checks: dict[str, asyncio.Task[None]] = {}
        """Handshakes that find out why; nobody waits for them, since the peer may be gone."""

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a channel; when it ends without a connection because of TLS, log why a little later.

        Raises ConfigError where the channel would lead beyond loopback in the clear: peers are also named by Redis and
        by routers, and the configuration knows nothing of them.
        """
        credentials = self._credentials
        if credentials is None and not self._allows_plaintext:
            self._check_loopback(address)
        if credentials is not None and credentials.is_permissive:
            found = await check_peer(address, credentials)
            credentials = None if found.speaks_tls is False else credentials
        async with _channel(address, credentials) as channel:
            try:
                yield channel
            finally:
                if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    self._check(address)
                else:
                    self._logged.pop(address, None)

    @property
    def can_connect(self) -> bool:
        """Whether this process opens plain connections: a permissive one does not know which kind its peer takes."""
        return self._credentials is None or not self._credentials.is_permissive

    async def connect(self, address: str, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Open a plain connection to another port of a peer, at host:port, in TLS where channels are.

        Raises OSError, which includes what TLS finds wrong, and ConfigError as `open` does, also for no address.
        """
        if self._credentials is None and not self._allows_plaintext:
            self._check_loopback(address)
        try:
            host, port = split(address)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        context = None if self._credentials is None else self._credentials.client_context()
        transport, _ = await asyncio.get_running_loop().create_connection(
            make_protocol, host, port, ssl=context, server_hostname=None if context is None else MEMBER_NAME
        )
        if (sock := transport.get_extra_info("socket")) is None:
            raise ConnectionResetError("the peer is gone")  # so uvloop shows that it has closed the connection
        keep_alive(sock)

    async def knock(self, address: str) -> None:
        """Open a TCP connection to a peer, and close it without a word.

        Raises OSError where nobody listens, and ConfigError for no address. It costs a tenth of a channel that fails.
        """
        try:
            host, port = split(address)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
        transport.abort()

    def _check_loopback(self, address: str) -> None:
        host = address.rpartition(":")[0].strip("[]")
        if is_loopback(host):
            return
        # The settings need pydantic, which the kernels' and the engine's own tests do without.
        from tandem.config.cluster_tls import plaintext_refusal

        refusal = plaintext_refusal(host)
        self._log_once(address, refusal)
        raise ConfigError(refusal)

    def _log_once(self, address: str, reason: str) -> None:
        if self._logged.get(address) != reason:
            _log.warning("no connection with %s: %s", address, reason)
            self._logged[address] = reason

    def _check(self, address: str) -> None:
        if address not in self._checks:
            check = self._checks[address] = asyncio.create_task(self._log_mismatch(address))
            check.add_done_callback(lambda _: self._checks.pop(address))

    async def _log_mismatch(self, address: str) -> None:
        found = await check_peer(address, self._credentials)
        if found.mismatch is not None:
            self._log_once(address, found.mismatch)


def open_blocking_channel(address: str, credentials: ClusterCredentials | None) -> grpc.Channel:
    """Open a channel for use outside an event loop. A permissive process speaks TLS, too: its peers take both."""
    return _channel(address, credentials, library=grpc)


def _channel(address: str, credentials: ClusterCredentials | None, library: Any = grpc.aio) -> Any:
    if credentials is None:
        return library.insecure_channel(address, options=CLIENT_OPTIONS)
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", MEMBER_NAME))
    return library.secure_channel(address, credentials.grpc_channel(), options=options)


def make_server(auth: ClusterAuth, *, max_connections: int | None = None) -> grpc.aio.Server:
    """Create a server for the cluster's own processes only; add servicers, bind with `listen`, start it.

    `max_connections`: further ones are closed; None for half of the files that this process may open.
    """
    return grpc.aio.server(interceptors=(auth,), options=_server_options(max_connections))


def _server_options(max_connections: int | None = None) -> tuple[tuple[str, int], ...]:
    if max_connections is None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_connections = _MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(files // 2, _MOST_CONNECTIONS)
    return (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections))


def listen(server: grpc.aio.Server, host: str, port: int, credentials: Any = None) -> int:
    """Bind and return the real port (port 0 takes a free one). Raises OSError when the address is taken.

    `credentials`: in TLS with them, else in the clear.
    """
    return _bind(server, f"{host}:{port}", credentials)


def _bind(server: grpc.aio.Server, address: str, credentials: Any) -> int:
    try:
        bound = int(
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    if bound == 0:
        raise OSError(f"cannot listen on {address}")
    return bound


async def serve_health(stack: AsyncExitStack, host: str, port: int | None, takes_work: Callable[[], bool]) -> None:
    """Serve a worker's health, and nothing else, in the clear until `stack` ends. Raises OSError.

    `port`: None to serve nothing.
    """
    if port is None:
        return
    server = grpc.aio.server(options=_server_options())
    server.add_generic_rpc_handlers((health_handler(takes_work),))
    listen(server, host, port)
    await server.start()
    stack.push_async_callback(server.stop, None)


async def open_port(
    stack: AsyncExitStack, server: grpc.aio.Server, host: str, port: int, credentials: ClusterCredentials | None
) -> int:
    """Bind a cluster's server, in TLS with `credentials`, and return the real port. Raises OSError.

    The relay that a permissive port needs is closed with `stack`.
    """
    if credentials is None or not credentials.is_permissive:
        return listen(server, host, port, None if credentials is None else credentials.grpc_server())
    mixed = await stack.enter_async_context(MixedPort(host.strip("[]"), port))
    _bind(server, f"unix:{mixed.plain_path}", None)
    _bind(server, f"unix:{mixed.tls_path}", credentials.grpc_server())
    return mixed.port
