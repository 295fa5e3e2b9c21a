"""From the cluster's configuration to what moving KV needs."""

from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.transports.catalogue import check_choice
from kv_transfer.transports.tcp.settings import TcpSettings, open_identity
from tandem.config.cluster import TransferConfig


def transfer_settings(transfer: TransferConfig) -> TransferSettings:
    """The hand-off layer's bounds."""
    return TransferSettings(
        lease_s=transfer.lease_s,
        chunk_bytes=transfer.chunk_bytes,
        wire_dtype="" if transfer.wire_dtype == "auto" else transfer.wire_dtype,
    )


def tcp_settings(transfer: TransferConfig, host: str) -> TcpSettings:
    """How KV travels over tcp from and to `host`, before there is any.

    Raises ConfigError for files of `transfer.tls` that are no good, and for a forced transport that cannot work here.
    """
    check_choice(transfer.transport, host=host, isolated_network=transfer.isolated_network)
    tls = transfer.tls
    identity = None if tls is None else open_identity(cert=tls.cert, key=tls.key, ca=tls.ca)
    return TcpSettings(streams=transfer.tcp_streams, tls=identity)
