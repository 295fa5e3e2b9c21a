"""The gRPC server: the service, health and reflection, started and stopped by its owner."""

import math
from types import TracebackType
from typing import Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.access.access_files import AccessControl
from router.access.tls import ServerTlsState
from router.api.frontend import Frontend
from router.api.slow_client import WRITE_TIMEOUT_S
from router.grpc.call_guard import MAX_METADATA_BYTES, StatusInterceptor
from router.grpc.service import InferenceService
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig
from tandem.rpc import cluster_grpc
from tandem.v1 import inference_pb2
from tandem.v1.inference_pb2_grpc import add_InferenceServicer_to_server

_MAX_AGE_MS = 600_000
"""Age at which gRPC has clients reconnect; calls in progress may finish."""
_LONGEST_MS = 2**31 - 1
_STREAMS = 8192
"""Calls of one connection at a time; its client queues further ones."""
_PENDING = 1 << 16
"""Calls that have arrived and are not accepted yet, which is soon: gRPC ends those beyond the bound with a bare
CANCELLED, by default from a thousand on."""
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


def build_server(
    frontend: Frontend,
    generator: Generator,
    config: RouterConfig,
    metrics: RouterMetrics,
    max_connections: int = 1024,
    *,
    shares_port: bool = False,
    write_timeout_s: float = WRITE_TIMEOUT_S,
    keeper: AccessControl | None = None,
) -> grpc.aio.Server:
    """Build a server of `tandem.v1.Inference` alone, not bound to a port yet."""
    keeper = keeper or AccessControl(config)
    keys = keeper.keys
    options = dict(cluster_grpc.SERVER_OPTIONS)
    options["grpc.max_receive_message_length"] = config.max_body_bytes
    options["grpc.max_metadata_size"] = MAX_METADATA_BYTES
    options["grpc.so_reuseport"] = int(shares_port)
    options |= _connection_options(config, max_connections)
    server = grpc.aio.server(
        interceptors=(StatusInterceptor(metrics, keys, keeper.audit),), options=tuple(options.items())
    )
    service = InferenceService(frontend, generator, keys, metrics, write_timeout_s=write_timeout_s)
    add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    return server


def _connection_options(config: RouterConfig, most: int) -> dict[str, int]:
    """Return server options that mirror the HTTP server's bounds on connections. An answer that its client does not
    read ends with the connection at the latest: gRPC cannot cancel it."""
    longest_s = config.request_timeout_s + WRITE_TIMEOUT_S
    return {
        "grpc.max_allowed_incoming_connections": most,
        "grpc.server_handshake_timeout_ms": math.ceil(1000 * config.connections.head_timeout_s),
        "grpc.max_connection_idle_ms": math.ceil(1000 * config.connections.keep_alive_s),
        "grpc.max_concurrent_streams": _STREAMS,
        # Calls that a client sends before it has received that number would be reset, some as UNAVAILABLE.
        "grpc.http.overload_protection": 0,
        "grpc.server.max_pending_requests": _PENDING,
        "grpc.server.max_pending_requests_hard_limit": _PENDING,
        "grpc.max_connection_age_ms": _MAX_AGE_MS,
        "grpc.max_connection_age_grace_ms": min(_LONGEST_MS, math.ceil(1000 * longest_s)),
    }


class GrpcServer:
    """Listens while entered. Health is NOT_SERVING until `set_serving(True)`, and again before the server closes."""

    def __init__(
        self, server: grpc.aio.Server, *, host: str, port: int, grace_s: float = 30.0, tls: ServerTlsState | None = None
    ) -> None:
        """`tls`: None for plaintext."""
        self._server = server
        self._tls = tls
        self._health = health.aio.HealthServicer()
        self._host = host
        self.port = port
        """The actual port once entered; port 0 picks a free one."""
        self._grace_s = grace_s

    async def __aenter__(self) -> Self:
        """Bind and start. Raises OSError when the address is taken."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self.set_serving(False)
        credentials = None if self._tls is None else self._tls.grpc_credentials()
        self.port = cluster_grpc.listen(self._server, self._host, self.port, credentials)
        await self._server.start()
        return self

    async def set_serving(self, serving: bool) -> None:
        """Set the health status of the server and of the service."""
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if serving else state.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(self._grace_s)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls; running ones may finish within `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
