"""Serves a worker's health as `grpc.health.v1`, for the kubelet and load balancers.

Such callers have no token of the cluster, so nothing that they send is read: the answer is the same for every service.
It does not cover whether the engine produces tokens: routers' canaries do, and a worker whose engine hangs exits.
"""

from collections.abc import Callable
from typing import Any

import grpc

_SERVICE = "grpc.health.v1.Health"
HEALTH_METHOD = f"/{_SERVICE}/Check"
# HealthCheckResponse{status}: machines that run workers need not have the package with its stubs.
SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


def health_handler(takes_work: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Build the handler of `Check`: SERVING while the event loop runs and `takes_work`, then NOT_SERVING."""

    async def check(_unread: Any, _context: Any) -> bytes:
        return SERVING if takes_work() else _NOT_SERVING

    # A stream of requests, which looks the same on the wire, is read only on demand: never.
    handler = grpc.stream_unary_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(_SERVICE, {"Check": handler})
