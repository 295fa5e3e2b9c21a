"""`python -m cluster.probe router|prefill|decode --config FILE`: a health check of the process in the same container.

It reads the same configuration as the process, so it connects to the right address, with TLS if configured. Exit codes:
0 healthy, 1 not healthy, 2 invalid configuration.
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
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # a process that listens on all addresses is probed on loopback
_Complaint = str | None


def check(config: ClusterConfig, role: str, index: int, *, is_ready: bool) -> _Complaint:
    """Return what is wrong, or None. Raises ConfigError."""
    try:
        if role == "router":
            return _ask_router(config.router, "/readyz" if is_ready else "/health")
        pool = config.prefill if role == "prefill" else config.decode
        return _ask_worker(config, *listen_address(pool, role, index))
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def _ask_router(config: RouterConfig, path: str) -> _Complaint:
    host = _ANY.get(config.host, config.host)
    if config.tls is None:
        connection = http.client.HTTPConnection(host, config.port, timeout=TIMEOUT_S)
    elif config.tls.client_ca is not None:
        socket.create_connection((host, config.port), TIMEOUT_S).close()  # there is no client certificate to present
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


def _ask_worker(config: ClusterConfig, host: str, port: int) -> _Complaint:
    import grpc

    from tandem.rpc.cluster_credentials import open_credentials
    from tandem.rpc.cluster_grpc import open_blocking_channel
    from tandem.rpc.health import HEALTH_METHOD, SERVING

    # The process that is asked has warned of plaintext at its start; this one runs every few seconds.
    credentials = open_credentials(config.cluster.tls, (host,), warns=False)
    with open_blocking_channel(f"{host}:{port}", credentials) as channel:
        try:
            options = channel.unary_unary(HEALTH_METHOD)(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return None if options == SERVING else "not serving"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="cluster.probe", description="check the health of the process in this container"
    )
    parser.add_argument("role", choices=("router", "prefill", "decode"))
    parser.add_argument("--config", type=Path, required=True, help="the cluster's YAML")
    parser.add_argument("--index", type=int, default=0, help="index of the worker in its pool")
    parser.add_argument(
        "--ready", action="store_true", help="for a router: whether a canary request has passed through the workers"
    )
    options = parser.parse_args(arguments)
    try:
        wrong = check(load(options.config), options.role, options.index, is_ready=options.ready)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if wrong is not None:
        sys.stderr.write(f"{options.role}: {wrong}\n")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
