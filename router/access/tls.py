"""Certificates of the public servers and the client authorities they trust; tried in a handshake before use."""

import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem.config.access import RouterTls
from tandem.errors import ConfigError
from tandem.rpc.certificates import client_of, handshake_in_memory, load_certificate, read_pem, trust

_SETTING = "router.tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """One loaded state of the certificate files."""

    context: ssl.SSLContext
    """TLS context of the HTTP server."""
    cert: str
    key: str
    client_ca: str | None

    def grpc_configuration(self) -> Any:
        """Return the certificate configuration for gRPC, which has its own TLS implementation."""
        authorities = None if self.client_ca is None else self.client_ca.encode()
        return grpc.ssl_server_certificate_configuration([(self.key.encode(), self.cert.encode())], authorities)


def read_identity(config: RouterTls) -> ServerIdentity:
    """Load the files as they are now. Raises ConfigError that names the setting and the problem."""
    cert, key = Path(config.cert), Path(config.key)
    texts = _texts(config)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key, _SETTING)
    _try(context, cert)
    if config.client_ca is not None:
        trust(context, Path(config.client_ca), f"{_SETTING}.client_ca")
        _check_dates(context, config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if _texts(config) != texts:
        raise ConfigError(f"{_SETTING}: the files changed while they were read")
    return ServerIdentity(context=context, cert=texts[0], key=texts[1], client_ca=texts[2])


def _try(server: ssl.SSLContext, cert: Path) -> None:
    try:
        handshake_in_memory(client_of(cert, f"{_SETTING}.cert"), server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{_SETTING}.cert: {cert}: no client would accept it: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConfigError(f"{_SETTING}: a test handshake failed: {error.reason}") from None


def _check_dates(context: ssl.SSLContext, path: str) -> None:
    """Check that some client authority is currently valid; expired ones admit no client. Raises ConfigError."""
    now_s, read_s = time.time(), ssl.cert_time_to_seconds
    found = context.get_ca_certs()
    if found and not any(read_s(str(one["notBefore"])) <= now_s <= read_s(str(one["notAfter"])) for one in found):
        raise ConfigError(f"{_SETTING}.client_ca: {path}: no client could connect: no authority is currently valid")


def _texts(config: RouterTls) -> tuple[str, str, str | None]:
    authorities = config.client_ca
    return (
        read_pem(Path(config.cert), f"{_SETTING}.cert"),
        read_pem(Path(config.key), f"{_SETTING}.key"),
        None if authorities is None else read_pem(Path(authorities), f"{_SETTING}.client_ca"),
    )


class ServerTlsState:
    """The identity that the servers use now. The event loop replaces it; gRPC's threads read it at each handshake."""

    def __init__(self, identity: ServerIdentity) -> None:
        self.identity = identity
        self._asks_clients = identity.client_ca is not None
        self._given = identity

    def grpc_credentials(self) -> Any:
        """Credentials for a gRPC port; each handshake uses the identity in force at that time."""
        configuration = self.identity.grpc_configuration()
        return grpc.dynamic_ssl_server_credentials(configuration, self._latest, self._asks_clients)

    def _latest(self) -> Any:
        """Return the new configuration; None when it has not changed."""
        identity = self.identity
        if identity is self._given:
            return None
        self._given = identity
        return identity.grpc_configuration()
