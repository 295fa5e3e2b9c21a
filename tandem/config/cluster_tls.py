"""Whether the processes of a cluster speak TLS to each other, and with which certificates."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, Self

from pydantic import SecretStr, model_validator

from tandem.config.section import Section
from tandem.errors import ConfigError
from tandem.rpc.hosts import is_loopback

_SCALARS = {"auto", "required", "permissive", "off"}


class LinkSecurity(Enum):
    """How a process protects its connections with others of its cluster."""

    PLAIN = "plain"
    PERMISSIVE = "permissive"
    """TLS with peers that speak it, plaintext with the others."""
    TLS = "tls"


class ClusterTls(Section):
    """Mutual TLS between the processes of this cluster. `cluster.tls: off` is short for `cluster.tls: {mode: off}`.
    `tandem cert` makes the files; all processes may share one certificate, or each host has its own of the same CA.
    Files are read again when they change, and every new connection uses them as they are then."""

    mode: Literal["auto", "required", "permissive", "off"] = "auto"
    """`auto`: `required` with certificates. Without any, `tandem up` makes them in memory if a worker listens beyond
    loopback, and processes started by hand refuse to listen or connect there. `required`: TLS on loopback, too.
    `permissive`: TLS where the peer speaks it, which protects nothing; only while a cluster changes to `required`
    because it was `off` or its version had no TLS. `off`: nothing is encrypted."""
    cert: str | None = None
    """PEM file of this process's certificate, followed by any intermediate certificates. It carries the DNS name
    tandem-cluster and is valid for servers and clients."""
    key: str | None = None
    """PEM file of the certificate's private key, unencrypted."""
    ca: str | None = None
    """PEM file of the cluster's CA. It must sign for members of this cluster only; during a change of the CA the file
    holds the old and the new one."""
    pem: SecretStr | None = None
    """Instead of the three files, their content: key, certificates and, last, the CA. `tandem up` fills it in."""

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, value: Any) -> Any:
        # YAML 1.1 reads `off` as false.
        if value is False:
            return {"mode": "off"}
        if isinstance(value, dict) and value.get("mode") is False:
            return value | {"mode": "off"}
        return {"mode": value} if isinstance(value, str) and value in _SCALARS else value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        files = {name: getattr(self, name) for name in ("cert", "key", "ca")}
        missing = [name for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            raise ValueError(f"{' and '.join(missing)} must be set, too: cert, key and ca belong together")
        if self.pem is not None and not missing:
            raise ValueError("pem and cert, key and ca are both set: set only one of them")
        return self

    @property
    def has_certificates(self) -> bool:
        return self.cert is not None or self.pem is not None


class ClusterSection(Section):
    """Settings that all processes of the cluster share."""

    tls: ClusterTls = ClusterTls()


def link_security(tls: ClusterTls, hosts: Iterable[str]) -> LinkSecurity:
    """Decide how a process speaks to others. `hosts`: where it listens and which peers it is told to reach.

    Raises ConfigError when certificates are needed and there are none.
    """
    if tls.mode == "off":
        return LinkSecurity.PLAIN
    if tls.has_certificates:
        return LinkSecurity.PERMISSIVE if tls.mode == "permissive" else LinkSecurity.TLS
    if tls.mode != "auto":
        raise ConfigError(
            f"cluster.tls: mode is {tls.mode} and there are no certificates: set cert, key and ca (`tandem cert` makes"
            " them)"
        )
    if beyond := first_beyond_loopback(hosts):
        raise ConfigError(plaintext_refusal(beyond))
    return LinkSecurity.PLAIN


def plaintext_refusal(host: str) -> str:
    """Explain why `auto` without certificates refuses a host beyond loopback, and what to do about it."""
    return (
        f"cluster.tls: {host} is beyond loopback, and traffic with it would not be encrypted: name certificates"
        " (`tandem cert` makes them), or set `cluster.tls: off` if nobody else reaches this network"
    )


def needs_certificates(tls: ClusterTls, hosts: Iterable[str]) -> bool:
    """Whether `tandem up`, which starts every process itself, must make certificates."""
    if tls.has_certificates:
        return False
    return tls.mode == "required" or (tls.mode == "auto" and first_beyond_loopback(hosts) is not None)


def first_beyond_loopback(hosts: Iterable[str]) -> str | None:
    """Return the first host that is not loopback; None when all are."""
    return next((host for host in hosts if not is_loopback(host.strip("[]"))), None)


def plain_warning(tls: ClusterTls, hosts: Iterable[str]) -> str | None:
    """Return a warning when traffic may leave this machine unprotected, else None."""
    if tls.mode not in ("off", "permissive") or (beyond := first_beyond_loopback(hosts)) is None:
        return None
    if tls.mode == "off":
        return f"traffic with {beyond} and other processes of the cluster is not encrypted (cluster.tls: off)"
    return "cluster.tls is permissive: peers without certificates are let in; set it to required when all have them"
