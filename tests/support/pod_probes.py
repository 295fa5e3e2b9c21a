"""What a kubelet does for a pod from outside: its probes, and the text of its secrets."""

import base64
import urllib.error
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def plain_secret(secret: Any) -> dict[str, str]:
    """What a Secret holds."""
    decoded = {name: base64.b64decode(value).decode() for name, value in secret.get("data", {}).items()}
    return decoded | secret.get("stringData", {})


def grpc_probe(address: str) -> bool:
    """One go of a probe by gRPC."""
    with grpc.insecure_channel(address) as channel:
        try:
            told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
        except grpc.RpcError:
            return False
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


def http_probe(url: str) -> bool:
    """One go of a probe by HTTP."""
    try:
        with urllib.request.urlopen(url, timeout=3.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
