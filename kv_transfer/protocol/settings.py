"""Settings of the hand-off layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Bounds and times of hand-offs; the same for every transfer of one worker."""

    lease_s: float = 2.0
    """Time without a sign of life from the peer after which a hand-off is given up."""
    stall_s: float = 30.0
    """Time without progress, after the prompt has left the queue, after which a hand-off is given up."""
    queue_s: float = 600.0
    """Longest time in the prefill worker's queue."""
    drain_s: float = 1.0
    """Time a failed hand-off waits for proof that its writer is quiet before its blocks are quarantined."""
    reroute_s: float = 10.0
    """Time the landed blocks of a failed hand-off are kept for another attempt."""
    chunk_bytes: int | None = None
    """Maximum payload bytes under one checksum (at least one unit of one layer); None: what suits the transport."""
    wire_dtype: str = ""
    """Dtype of KV on the wire; "" for the one that costs least."""
    write_window: int = 4
    """Maximum number of concurrent writes of one hand-off."""
    max_rewrites: int = 3
    """Maximum number of rewrites of a damaged chunk."""
    max_transfers: int = 1024
    """Maximum number of concurrent hand-offs in one process."""
    sweep_s: float = 0.1
    """Period of the reaper."""
    connect_s: float = 2.0
    """Longest time to reach a peer and exchange HELLOs."""
    max_backoff_s: float = 2.0
    """Longest pause between two attempts to reach a peer."""
    forget_s: float = 60.0
    """Time without contact after which a peer without hand-offs is no longer dialled."""

    @property
    def renew_s(self) -> float:
        """Period of RENEW: a quarter of the lease, so that a late one does no harm."""
        return self.lease_s / 4
