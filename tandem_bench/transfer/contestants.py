"""The contestants: the machine's limits, Tandem's transports, the peers; each has a sender and a receiver process."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_bench.errors import require_extra
from tandem_bench.peers.environments import PeerEnvironment, ensure
from tandem_bench.transfer.options import PEER_NAMES

COPY, COPY_RANGES = "copy", "copy of ranges"
PLAIN = "plain tcp"
SHM, SHM_BARE = "shm", "shm bare"
TCP, TCP_BARE = "tcp", "tcp bare"
TLS = "tls"
"""Transports of Tandem; a bare one computes no checksums, which only this benchmark can request."""
_ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_ENDS = _HERE / "ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One side of the comparison, and how its processes are started."""

    name: str
    file: Path
    """File that defines `Sender` and, unless that moves everything alone, `Receiver`."""
    python: Path = Path(sys.executable)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    is_alone: bool = False
    is_whole: bool = False
    """Whether it moves as many bytes as the case has, but from the pools' beginnings and in one piece."""


def limits() -> list[Contestant]:
    """Return upper limits of this machine: a copy within a host, a plain pair of sockets over tcp.

    One large copy is faster than the same bytes range by range: beyond glibc's `x86_non_temporal_threshold`, memcpy
    bypasses the caches and does not read what it overwrites.
    """
    return [
        Contestant(name=COPY, file=_ENDS / "on_copy.py", options={"is_whole": True}, is_alone=True, is_whole=True),
        Contestant(name=COPY_RANGES, file=_ENDS / "on_copy.py", options={"is_whole": False}, is_alone=True),
        Contestant(name=PLAIN, file=_ENDS / "on_plain.py"),
    ]


def ours() -> list[Contestant]:
    """Return Tandem's transports without TLS; their options are those of `our_ends.py`."""
    modes: Mapping[str, Mapping[str, Any]] = {
        SHM: {"transport": "shm", "checksums": True},
        SHM_BARE: {"transport": "shm", "checksums": False},
        TCP: {"transport": "tcp", "checksums": True},
        TCP_BARE: {"transport": "tcp", "checksums": False},
    }
    return [_our(name, options) for name, options in modes.items()]


def tls(folder: Path) -> Contestant:
    """Return Tandem's `tcp` in TLS 1.3, with certificates made in `folder`. Raises ExtraMissing without trustme."""
    return _our(TLS, {"transport": "tcp", "checksums": True, "tls": _issue_certificates(folder)})


def _issue_certificates(folder: Path) -> dict[str, str]:
    """Return the paths of a certificate, its key and its authority, which signs nothing else, as in `transfer.tls`."""
    require_extra("trustme", "a contest in TLS")
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("bench.tandem.internal")
    files = {name: folder / f"{name}.pem" for name in ("cert", "key", "ca")}
    files["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files["key"].touch(mode=0o600)
    files["key"].write_bytes(issued.private_key_pem.bytes())
    files["ca"].write_bytes(authority.cert_pem.bytes())
    return {name: str(path) for name, path in files.items()}


def _our(name: str, options: Mapping[str, Any]) -> Contestant:
    # Its modules are found wherever this one was, installed or not.
    return Contestant(name=name, file=_HERE / "our_ends.py", options=options, environment={"PYTHONPATH": str(_ROOT)})


PEER_ENVIRONMENTS: Mapping[str, PeerEnvironment] = {
    environment.name: environment
    for environment in (
        # Its Python interface imports torch, first and alone as in tandem_bench/peers/environments.py.
        PeerEnvironment(name="nixl", steps=(("torch==2.13.0", "numpy==2.4.6"), ("torch==2.13.0", "nixl==1.5.1"))),
        # Its library is linked with libibverbs.so.1 (Debian: libibverbs1) even where it moves bytes over TCP.
        PeerEnvironment(name="mooncake", steps=(("mooncake-transfer-engine-non-cuda==0.3.13.post1",),)),
    )
}
"""Environments of the peers; gloo has none of its own, as it is part of torch."""
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    # Over shared memory it would not be comparable.
    "nixl": {"UCX_TLS": "tcp"},
    "mooncake": {},
    "gloo": {"GLOO_SOCKET_IFNAME": "lo"},
}


def peer(name: str, note: Callable[[str], None]) -> Contestant:
    """Return a peer, creating its environment if missing. Raises PeerNotInstalled; KeyError for an unknown peer."""
    if name not in PEER_NAMES:
        raise KeyError(name)
    environment = PEER_ENVIRONMENTS.get(name)
    python = ensure(environment, note) if environment else Path(sys.executable)
    return Contestant(name=name, file=_ENDS / f"on_{name}.py", python=python, environment=_VARIABLES[name])
