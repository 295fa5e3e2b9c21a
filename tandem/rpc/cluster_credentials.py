"""Credentials of one process for `cluster.tls`: the same files for gRPC and for plain sockets, read again on change.

Whoever shows a certificate of the cluster's CA is a member; a client also checks that the server's carries MEMBER_NAME.
The role is not in the certificate, and addresses are not checked.
"""

import logging
import os
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tandem.errors import ConfigError
from tandem.rpc.mutual_tls import MEMBER_NAME, TlsFiles
from tandem.rpc.renewable_tls import LoadedTls, RenewableTls

if TYPE_CHECKING:
    from tandem.config.cluster_tls import ClusterTls

ALPN = "h2"
"""Protocol that a TLS client must offer by ALPN: a gRPC server closes connections without it."""
_SETTING = "cluster.tls"
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----\n?", re.DOTALL)
_log = logging.getLogger(__name__)


class ClusterCredentials:
    """Certificate, key and CA of this process. Thread-safe, since gRPC asks for them on threads of its own.

    Every new connection checks whether the files have changed.
    """

    def __init__(self, files: TlsFiles, *, is_permissive: bool = False) -> None:
        """Read and try the files. Raises ConfigError that names the file and what is wrong with it."""
        self.files = files
        self.is_permissive = is_permissive
        """Whether to accept peers without TLS, and to speak to them in the clear."""
        self._tls = RenewableTls(files, use="sessions and hand-offs", name=MEMBER_NAME, alpn=ALPN)

    @property
    def not_after_s(self) -> float:
        """Unix time at which the certificate in force expires."""
        return self._tls.current().tls.not_after_s

    def client_context(self) -> ssl.SSLContext:
        """Return the context for one outgoing connection, to be used with `server_hostname=MEMBER_NAME`."""
        return self._tls.current().tls.client

    def server_context(self) -> ssl.SSLContext:
        """Return the context for one incoming connection."""
        return self._tls.current().tls.server

    def grpc_channel(self) -> Any:
        """Create credentials for one gRPC channel, whose option `grpc.ssl_target_name_override` must be MEMBER_NAME."""
        now = self._tls.current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def grpc_server(self) -> Any:
        """Create credentials for a gRPC port; each handshake uses the certificate and the CA in force at that time."""
        given = self._tls.current()

        def latest() -> Any:
            nonlocal given
            if (now := self._tls.current()) is given:
                return None
            given = now
            return _grpc_configuration(now)

        return grpc.dynamic_ssl_server_credentials(_grpc_configuration(given), latest, True)


def _grpc_configuration(loaded: LoadedTls) -> Any:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)


def open_credentials(tls: "ClusterTls", hosts: Iterable[str], *, warns: bool = True) -> ClusterCredentials | None:
    """Open the credentials of a process that listens at, or connects to, `hosts`; None: it speaks in the clear.

    Raises ConfigError when certificates are missing or no good. `warns`: log that traffic leaves the machine
    unprotected, where it does.
    """
    # The settings need pydantic, which the kernels' and the engine's own tests do without.
    from tandem.config.cluster_tls import LinkSecurity, link_security, plain_warning

    hosts = list(hosts)
    security = link_security(tls, hosts)
    if warns and (warning := plain_warning(tls, hosts)):
        _log.warning("%s", warning)
    if security is LinkSecurity.PLAIN:
        return None
    return ClusterCredentials(_files(tls), is_permissive=security is LinkSecurity.PERMISSIVE)


def _files(tls: "ClusterTls") -> TlsFiles:
    if tls.pem is not None:
        return _files_in_memory(tls.pem.get_secret_value())
    assert tls.cert and tls.key and tls.ca  # noqa: S101, PT018  # narrows: the section checks that all are set
    return TlsFiles(cert=Path(tls.cert), key=Path(tls.key), ca=Path(tls.ca), setting=_SETTING)


def _files_in_memory(pem: str) -> TlsFiles:
    """Write the parts of one PEM text to files in memory, which exist as long as this process."""
    blocks = {found.group(0): found.group(1) for found in _BLOCK.finditer(pem)}
    keys = [text for text, kind in blocks.items() if kind.endswith("PRIVATE KEY")]
    certificates = [text for text, kind in blocks.items() if kind == "CERTIFICATE"]
    if len(keys) != 1 or len(certificates) < 2:
        raise ConfigError("cluster.tls.pem must hold one private key, a certificate, and the CA's")
    *chain, ca = certificates
    return TlsFiles(cert=_in_memory("".join(chain)), key=_in_memory(keys[0]), ca=_in_memory(ca), setting=_SETTING)


def _in_memory(text: str) -> Path:
    fd = os.memfd_create("tandem-pem", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return Path(f"/proc/{os.getpid()}/fd/{fd}")
