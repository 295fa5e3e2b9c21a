"""gRPC between processes of one cluster: authentication, keepalive, and shutdown of servers.

Peers prove that they belong to the cluster by a token derived from its secret; the secret itself never travels.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tandem.rpc.health import HEALTH_METHOD

TOKEN_KEY = "tandem-cluster-token"  # noqa: S105  # the header's name
MAX_MESSAGE_BYTES = 32 << 20

# Names as in gRPC core's channel_arg_names.h: a misspelt key is ignored in silence.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers must never share a port by accident: the second one fails at once.
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A worker that comes back should be found within a second, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)

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


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to another process of the cluster."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


def make_server(auth: ClusterAuth) -> grpc.aio.Server:
    """Create a server for the cluster's own processes only; add servicers, bind with `listen`, start it."""
    return grpc.aio.server(interceptors=(auth,), options=SERVER_OPTIONS)


def listen(server: grpc.aio.Server, host: str, port: int, credentials: Any = None) -> int:
    """Bind and return the real port (port 0 takes a free one). Raises OSError when the address is taken.

    `credentials`: in TLS with them, else in the clear.
    """
    address = f"{host}:{port}"
    try:
        bound = int(
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None
    if bound == 0:
        raise OSError(f"cannot listen on {host}:{port}")
    return bound
