"""From the cluster's configuration to what moving KV needs."""

from kv_transfer.config import TransferSettings
from tandem.config import TransferConfig


def transfer_settings(transfer: TransferConfig) -> TransferSettings:
    """The hand-off layer's bounds."""
    return TransferSettings(
        lease_s=transfer.lease_s,
        chunk_bytes=transfer.chunk_bytes,
        wire_dtype="" if transfer.wire_dtype == "auto" else transfer.wire_dtype,
    )
