"""`python -m cluster.probe router|prefill|decode --config FILE`: is the process beside me well? For health checks.

It reads what the process reads, so that it asks where that one listens, in TLS if need be. Exit codes: 0 well, 1 not,
2 a wrong configuration.
"""

import argparse
import http.client
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.config.cluster import ClusterConfig, RouterConfig, load
from tandem.config.worker import listen_address
from tandem.errors import ConfigError

TIMEOUT_S = 4.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # who listens everywhere is asked on loopback
_Complaint = str | None


def ask(config: ClusterConfig, role: str, index: int, *, is_ready: bool) -> _Complaint:
    """What is wrong, or None. Raises ConfigError."""
    try:
        if role == "router":
            return _ask_router(config.router, "/readyz" if is_ready else "/health")
        pool = config.prefill if role == "prefill" else config.decode
        return _ask_worker(*listen_address(pool, role, index))
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def _ask_router(config: RouterConfig, path: str) -> _Complaint:
    host = _ANY.get(config.host, config.host)
    if config.tls is None:
        connection = http.client.HTTPConnection(host, config.port, timeout=TIMEOUT_S)
    elif config.tls.client_ca is not None:
        socket.create_connection((host, config.port), TIMEOUT_S).close()  # nobody gave us a certificate to show
        return None
    else:
        from tandem.rpc.certificates import client_of

        context = client_of(Path(config.tls.cert), "router.tls.cert")
        connection = http.client.HTTPSConnection(host, config.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    finally:
        connection.close()
    return None if status == http.HTTPStatus.OK else f"{path}: {status}"


def _ask_worker(host: str, port: int) -> _Complaint:
    import grpc

    from tandem.rpc.health import HEALTH_METHOD, SERVING

    with grpc.insecure_channel(f"{host}:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            told = channel.unary_unary(HEALTH_METHOD)(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return None if told == SERVING else "takes no work"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, down to its exit code."""
    parser = argparse.ArgumentParser(prog="cluster.probe", description="ask the process in this container how it is")
    parser.add_argument("role", choices=("router", "prefill", "decode"))
    parser.add_argument("--config", type=Path, required=True, help="the cluster's YAML")
    parser.add_argument("--index", type=int, default=0, help="which worker of the pool")
    parser.add_argument("--ready", action="store_true", help="of a router: has a canary come through the workers?")
    told = parser.parse_args(arguments)
    try:
        wrong = ask(load(told.config), told.role, told.index, is_ready=told.ready)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if wrong is not None:
        sys.stderr.write(f"{told.role}: {wrong}\n")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
