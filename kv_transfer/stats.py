"""Counters of one hub, read by its worker's metrics."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Totals since start, and gauges of now. Bytes and seconds are counted together, at the same chunks."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Receiver: summed over hand-offs, from reservation to commit. Sender: summed over writes."""
    chunks: int = 0
    nacks: int = 0
    started: int = 0
    committed: int = 0
    failed: int = 0
    expired: int = 0
    """Of the failed: by the end of a lease."""
    cancelled: int = 0
    bad_messages: int = 0
    live: int = 0
    """Gauge: hand-offs not yet closed."""
    quarantined_blocks: int = 0
    """Gauge."""
