"""Derives settings for moving KV from the cluster's configuration."""

from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.transports.catalogue import check_choice
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.config.cluster import TransferConfig
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.mutual_tls import TlsFiles


def transfer_settings(transfer: TransferConfig) -> TransferSettings:
    """Limits and times of the hand-off layer."""
    return TransferSettings(
        lease_s=transfer.lease_s,
        chunk_bytes=transfer.chunk_bytes,
        wire_dtype="" if transfer.wire_dtype == "auto" else transfer.wire_dtype,
    )


def tcp_settings(transfer: TransferConfig, host: str, credentials: ClusterCredentials | None = None) -> TcpSettings:
    """Settings of KV over tcp from and to `host`. `credentials`: those of `cluster.tls`.

    Raises ConfigError for invalid files, and for a forced transport that cannot work here.
    """
    check_choice(transfer.transport, host=host, isolated_network=transfer.isolated_network)
    files = kv_tls_files(transfer, credentials)
    return TcpSettings(streams=transfer.tcp_streams, tls=None if files is None else TlsIdentity(files))


def kv_tls_files(transfer: TransferConfig, credentials: ClusterCredentials | None) -> TlsFiles | None:
    """Certificates for KV and for ranks on other nodes: `transfer.tls`, else those of `cluster.tls`."""
    if transfer.tls is not None:
        return transfer.tls.files()
    # Both ends of a hand-off must agree, and peers of a permissive process may know no TLS.
    return None if credentials is None or credentials.is_permissive else credentials.files
