"""Credentials of one process in its cluster's TLS: the same files for gRPC and for plain sockets, read anew on change.

Whoever shows a certificate of the cluster's CA is a member; a client also checks that the server's carries MEMBER_NAME.
The role is not in the certificate, and addresses are not checked.
"""

import logging
import os
import re
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tandem.errors import ConfigError
from tandem.rpc.certificates import read_pem
from tandem.rpc.mutual_tls import MEMBER_NAME, MutualTls, TlsFiles

if TYPE_CHECKING:
    from tandem.config.cluster_tls import ClusterTls

ALPN = "h2"
"""Without it a gRPC server hangs up."""
_SETTING = "cluster.tls"
_READS = 3
"""Attempts to read files that change meanwhile."""
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----\n?", re.DOTALL)
_log = logging.getLogger(__name__)
_Seen = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """One state of the files."""

    tls: MutualTls
    cert: bytes
    key: bytes
    ca: bytes

    def grpc_configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


class ClusterCredentials:
    """Thread-safe: gRPC asks on threads of its own. Every new connection looks whether the files have changed."""

    def __init__(self, files: TlsFiles, *, is_permissive: bool = False) -> None:
        """Read and try the files. Raises ConfigError that names the file and what is wrong with it."""
        self.files = files
        self.is_permissive = is_permissive
        """Whether peers without TLS are let in, and spoken to in the clear."""
        self._lock = threading.Lock()
        self._seen = _stats(files)
        self._loaded = _load(files)

    @property
    def not_after_s(self) -> float:
        """Unix time at which the certificate in force expires."""
        return self._current().tls.not_after_s

    def client_context(self) -> ssl.SSLContext:
        """For one outgoing connection, with `server_hostname=MEMBER_NAME`."""
        return self._current().tls.client

    def server_context(self) -> ssl.SSLContext:
        """For a listener; each handshake uses the certificate and the CA in force at that time."""
        context = self._current().tls.server

        def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current().tls.server

        context.sni_callback = use_current
        return context

    def grpc_channel(self) -> Any:
        """For one gRPC channel, whose option `grpc.ssl_target_name_override` must be MEMBER_NAME."""
        now = self._current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def grpc_server(self) -> Any:
        """For a gRPC port; each handshake uses the certificate and the CA in force at that time."""
        given = self._current()

        def latest() -> Any:
            nonlocal given
            if (now := self._current()) is given:
                return None
            given = now
            return now.grpc_configuration()

        return grpc.dynamic_ssl_server_credentials(given.grpc_configuration(), latest, True)

    def _current(self) -> _Loaded:
        with self._lock:
            if (seen := _stats(self.files)) != self._seen:
                self._seen = seen
                try:
                    self._loaded = _load(self.files)
                    _log.info(
                        "new certificates of cluster.tls are in force (KV over tcp uses them from the next start)"
                    )
                except ConfigError as error:
                    _log.error("%s; the previous certificates stay in force", error)
            return self._loaded


def open_credentials(tls: "ClusterTls", hosts: Iterable[str]) -> ClusterCredentials | None:
    """Credentials of a process that listens at, or connects to, `hosts`; None: it speaks in the clear.

    Raises ConfigError when certificates are missing or no good. Warns of traffic that leaves the machine unprotected.
    """
    # The settings need pydantic, which the kernels' and the engine's own tests do without.
    from tandem.config.cluster_tls import LinkSecurity, link_security, plain_warning

    hosts = list(hosts)
    security = link_security(tls, hosts)
    if warning := plain_warning(tls, hosts):
        _log.warning("%s", warning)
    if security is LinkSecurity.PLAIN:
        return None
    return ClusterCredentials(_files(tls), is_permissive=security is LinkSecurity.PERMISSIVE)


def _files(tls: "ClusterTls") -> TlsFiles:
    if tls.pem is not None:
        return _files_in_memory(tls.pem.get_secret_value())
    assert tls.cert and tls.key and tls.ca  # noqa: S101, PT018  # narrows: the section checks that all are set
    return TlsFiles(cert=Path(tls.cert), key=Path(tls.key), ca=Path(tls.ca))


def _files_in_memory(pem: str) -> TlsFiles:
    """The parts of one text as files that exist as long as this process."""
    blocks = {found.group(0): found.group(1) for found in _BLOCK.finditer(pem)}
    keys = [text for text, kind in blocks.items() if kind.endswith("PRIVATE KEY")]
    certificates = [text for text, kind in blocks.items() if kind == "CERTIFICATE"]
    if len(keys) != 1 or len(certificates) < 2:
        raise ConfigError("cluster.tls.pem must hold one private key, a certificate, and the CA's")
    *chain, ca = certificates
    return TlsFiles(cert=_in_memory("".join(chain)), key=_in_memory(keys[0]), ca=_in_memory(ca))


def _in_memory(text: str) -> Path:
    fd = os.memfd_create("tandem-pem", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def _load(files: TlsFiles) -> _Loaded:
    for _ in range(_READS):
        seen = _stats(files)
        cert, key, ca = (
            read_pem(getattr(files, name), f"{_SETTING}.{name}").encode() for name in ("cert", "key", "ca")
        )
        tls = MutualTls(files, _SETTING, name=MEMBER_NAME)
        tls.client.set_alpn_protocols([ALPN])
        if _stats(files) == seen:
            return _Loaded(tls=tls, cert=cert, key=key, ca=ca)
    raise ConfigError(f"{_SETTING}: the files keep changing while they are read")


def _stats(files: TlsFiles) -> _Seen:
    return tuple(_stat(path) for path in (files.cert, files.key, files.ca))


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
