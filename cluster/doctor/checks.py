"""`tandem doctor`: what this machine has, what is wrong with it, and what to do about that.

Every check is a small function that returns one or more findings. Peculiarities of a machine are findings, not errors.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from cluster.doctor import machine, packages, software
from cluster.doctor.findings import Check, Finding, Status
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.config.cluster import ClusterConfig
from tandem.config.cluster_tls import ClusterTls, needs_certificates, plain_warning
from tandem.config.worker import peer_hosts
from tandem.errors import ConfigError
from tandem.rpc.hosts import join
from tandem.rpc.mutual_tls import MutualTls, TlsFiles

_EXPIRES_SOON_S = 14 * 86_400.0


def examine(config: ClusterConfig, *, router_only: bool = False) -> list[Finding]:
    """Run every check, in display order; with `router_only`, only those of what a router needs."""
    router_checks: tuple[Check, ...] = (
        software.python,
        packages.router_packages,
        software.redis,
        software.router_compiler,
        software.tokenizer,
    )
    all_software: tuple[Check, ...] = (
        software.python,
        packages.packages,
        software.torch,
        software.cuda,
        software.gpus,
        software.triton,
        software.redis,
        software.compiler,
        software.model,
        software.architecture,
        software.adapters,
        software.dtype,
        software.quality_gate,
    )
    here: tuple[Check, ...] = (machine.cores, machine.memory, machine.disk, machine.shared_memory, machine.limits)
    of_workers: tuple[Check, ...] = () if router_only else (kv_certificates,)
    software_checks = router_checks if router_only else all_software
    checks = (*software_checks, *here, ports, locks, cluster_state, members, *of_workers)
    return [finding for check in checks for finding in _findings(check, config)]


def _findings(check: Check, config: ClusterConfig) -> list[Finding]:
    """Run one check; what it cannot import is a finding, too."""
    try:
        return check(config)
    except ImportError as error:
        name = check.__name__.removeprefix("router_").replace("_", " ")
        return [Finding(name=name, status=Status.FAIL, detail=f"not checked: {error}", hint="see `packages` above")]


def ports(config: ClusterConfig) -> list[Finding]:
    """Check whether the router's ports are free, and whether loopback works at all."""
    host, found = config.router.host, []
    options = (("HTTP port", config.router.port, "--port"), ("gRPC port", config.router.grpc_port, "--grpc-port"))
    for name, port, option in options:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        except OSError as error:
            hint = f"choose another with `tandem up {option} N`, or stop the process that listens there"
            status = Status.WARN if port else Status.FAIL
            found.append(Finding(name=name, status=status, detail=f"{host}:{port}: {error.strerror}", hint=hint))
        else:
            found.append(Finding(name=name, status=Status.OK, detail=f"{host}:{port} is free"))
    return found


def members(config: ClusterConfig) -> list[Finding]:
    """Check the certificates by which the cluster's processes know each other."""
    from tandem.rpc.cluster_credentials import open_credentials

    tls, hosts = config.cluster.tls, peer_hosts(config)
    name = "cluster TLS"
    if needs_certificates(tls, hosts):
        detail = "no certificates: `tandem up` makes its own, and processes started by hand do not start"
        hint = "`tandem cert` makes certificates; `cluster.tls: off` does without"
        return [Finding(name=name, status=Status.WARN, detail=detail, hint=hint)]
    try:
        credentials = open_credentials(tls, hosts, warns=False)  # a finding says it
    except ConfigError as error:
        return [Finding(name=name, status=Status.FAIL, detail=str(error))]
    found = []
    if warning := plain_warning(tls, hosts):
        found.append(Finding(name=name, status=Status.WARN, detail=warning))
    if credentials is not None:
        hint = f"renew it ({_renewal(tls, credentials.files)}): no new connection is possible afterwards"
        found.append(_validity(name, credentials.files, credentials.not_after_s, hint))
    return found


def _renewal(tls: ClusterTls, files: TlsFiles) -> str:
    if tls.pem is not None:
        return "new content for cluster.tls.pem"
    name = "" if files.cert.stem == "member" else f" --name {files.cert.stem}"
    return f"`tandem cert {files.cert.parent}{name} --renew` where the CA's key is"


def kv_certificates(config: ClusterConfig) -> list[Finding]:
    """Check the certificates that KV over tcp has of its own."""
    name = "KV TLS"
    if config.transfer.tls is None:
        return []
    files = config.transfer.tls.files()
    try:
        not_after_s = MutualTls(files).not_after_s
    except ConfigError as error:
        return [Finding(name=name, status=Status.FAIL, detail=str(error))]
    return [_validity(name, files, not_after_s, "renew it: no KV travels over tcp afterwards")]


def _validity(name: str, files: TlsFiles, not_after_s: float, hint: str) -> Finding:
    soon = not_after_s - time.time() < _EXPIRES_SOON_S
    detail = f"{files.cert} and its CA are valid until {datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d}"
    return Finding(name=name, status=Status.WARN if soon else Status.OK, detail=detail, hint=hint if soon else "")


def locks(config: ClusterConfig) -> list[Finding]:
    """Check the servers' certificates and API keys, where any are configured."""
    from router.access.tls import read_identity
    from tandem.config.access import read_keys

    router, found = config.router, []
    try:
        if router.tls is not None:
            read_identity(router.tls)
            found.append(
                Finding(name="TLS", status=Status.OK, detail=f"{router.tls.cert} is valid, and its key is present")
            )
        if router.api_keys_file is not None:
            keys, _ = read_keys(Path(router.api_keys_file), router.limits)
            found.append(Finding(name="API keys", status=Status.OK, detail=f"{len(keys)} in {router.api_keys_file}"))
    except ConfigError as error:
        found.append(Finding(name="locks", status=Status.FAIL, detail=str(error)))
    if router.warning is not None:
        found.append(Finding(name="locks", status=Status.WARN, detail=router.warning))
    return found


def cluster_state(config: ClusterConfig) -> list[Finding]:
    """Ask the configured Redis for an answer, through each of its sentinels."""
    settings = config.redis.redis_settings()
    if settings is None:
        return []
    sentinel = settings.sentinel
    if sentinel is None:
        return [asyncio.run(_ask_redis("cluster state", settings))]
    return [
        asyncio.run(
            _ask_redis(f"sentinel {join(*one)}", replace(settings, sentinel=replace(sentinel, addresses=(one,))))
        )
        for one in sentinel.addresses
    ]


async def _ask_redis(name: str, settings: RedisSettings) -> Finding:
    from tandem.rpc.redis_link import REDIS_BREAKER, RedisDown, RedisLink

    try:
        link = RedisLink(settings, CircuitBreaker(REDIS_BREAKER, Random()), use="doctor", clock=time.monotonic)
        try:
            with _silenced("tandem.rpc.redis_link"):  # the finding says the same
                await link.execute([("PING",)], vital=1)
        finally:
            await link.close()
    except (RedisDown, ConfigError) as error:
        hint = "requests do not wait for Redis, but routers on several hosts share nothing without it"
        return Finding(name=name, status=Status.WARN, detail=f"{settings.display_name}: {error}", hint=hint)
    return Finding(name=name, status=Status.OK, detail=f"Redis at {link.display_name} answers")


@contextmanager
def _silenced(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
