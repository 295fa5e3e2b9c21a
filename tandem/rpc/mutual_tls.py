"""Mutual TLS between the processes of one cluster: both ends show certificates of one private authority.

These contexts speak TLS 1.3 only. gRPC, which takes the same files, has no setting for the lowest version: its ports
also accept TLS 1.2.

Addresses change from pod to pod and are not checked. So the authority should sign for members of the cluster only.
"""

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.rpc.certificates import first_certificate, handshake_in_memory, load_certificate, read_pem, trust

MEMBER_NAME = "tandem-cluster"
"""DNS name in the certificate of every member of a cluster, whatever its role or address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one process: its certificate with any intermediate ones, its key, and the CA."""

    cert: Path
    key: Path
    ca: Path
    setting: str
    """The configuration's name of what the files are given for: errors begin with it."""


class MutualTls:
    """A process's certificate and trusted authority, for both ends of a connection."""

    def __init__(self, files: TlsFiles, *, name: str | None = None, alpn: str | None = None) -> None:
        """Read the files and do a handshake with itself. Raises a ConfigError that names the file and the fault.

        `name`: DNS name that servers' certificates must carry; None: any. `alpn`: protocol that clients offer.
        """
        setting = files.setting
        self.fingerprint = hashlib.sha256(first_certificate(files.cert, f"{setting}.cert")).digest()
        """SHA-256 of the presented certificate, in DER."""
        read_pem(files.key, f"{setting}.key")
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, files)
        # Tickets would let a peer resume without a check of its certificate.
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self.client.check_hostname = name is not None
        if alpn is not None:
            self.client.set_alpn_protocols([alpn])
        try:
            shown = handshake_in_memory(self.client, self.server, name)
        except ssl.SSLCertVerificationError as error:
            reason = f"{files.cert} is not good for {files.ca}: {error.verify_message}"
            raise ConfigError(f"{setting}.cert: {reason}") from None
        except ssl.SSLError as error:
            raise ConfigError(f"{setting}: no handshake is possible: {error.reason}") from None
        authorities = [not_after_s(one) for one in self.client.get_ca_certs()]
        self.not_after_s = min(not_after_s(shown), max(authorities, default=float("inf")))
        """Unix time at which the certificate or the last of its authorities expires."""


def peer_fingerprint(sock: ssl.SSLSocket) -> bytes:
    """SHA-256 of the certificate that the peer presented, after the handshake."""
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def not_after_s(certificate: Mapping[str, Any]) -> float:
    """Unix time at which a decoded certificate expires."""
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def tls_reason(error: ssl.SSLError, setting: str) -> str:
    """Describe why a handshake failed. `setting`: what says that this process speaks TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if error.reason == "TLSV1_ALERT_PROTOCOL_VERSION":
        return f"the peer does not support TLS 1.3, but {setting} is set here"
    return f"TLS: {error.reason or error}"


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    trust(context, files.ca, f"{files.setting}.ca")
    load_certificate(context, files.cert, files.key, files.setting)
    return context
