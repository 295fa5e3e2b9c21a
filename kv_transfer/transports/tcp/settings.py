"""Settings of a worker's `tcp` ends."""

from dataclasses import dataclass
from pathlib import Path

from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.rpc.mutual_tls import TlsFiles

NAME = "tcp"
STALL_S = 5.0
"""Longest time for a whole HELLO or header, and longest pause in the middle of a payload."""
MAX_STREAMS = 16
"""Maximum number of streams from one sender to one receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSettings:
    """Settings for all peers of a worker. Raises ValueError."""

    streams: int = 2
    """Connections to each receiver, 1 to MAX_STREAMS."""
    tls: TlsIdentity | None = None
    """TLS identity; None: bytes travel in the clear, and peers that use TLS are refused."""
    stall_s: float = STALL_S

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= MAX_STREAMS:
            raise ValueError(f"streams must be 1 to {MAX_STREAMS}, got {self.streams}")


PLAIN = TcpSettings()
NO_CERTIFICATES = "this worker has no certificates for KV (transfer.tls, or cluster.tls unless permissive)"


def open_identity(*, cert: str, key: str, ca: str) -> TlsIdentity:
    """From paths of PEM files. Raises ConfigError."""
    return TlsIdentity(TlsFiles(cert=Path(cert), key=Path(key), ca=Path(ca), setting="transfer.tls"))
