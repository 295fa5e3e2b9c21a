"""Settings of the hand-off layer: every default stated once, here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Bounds and times of hand-offs; the same for every transfer of one worker."""

    lease_s: float = 2.0
    """A hand-off whose peer is silent this long is given up."""
    stall_s: float = 30.0
    """A hand-off that left the queue and makes no progress this long is given up, though its peer is alive."""
    queue_s: float = 600.0
    """Most time in the prefill worker's queue."""
    drain_s: float = 1.0
    """How long a failed hand-off waits for proof that its writer is quiet before its blocks are quarantined."""
    reroute_s: float = 10.0
    """How long landed blocks of a failed hand-off wait for another route."""
    chunk_bytes: int = 8 << 20
    """Most payload bytes under one checksum (at least one unit of one layer)."""
    wire_dtype: str = ""
    """What KV should travel in; "" for what costs least."""
    write_window: int = 4
    """Writes of one hand-off under way at once."""
    max_rewrites: int = 3
    """How often one damaged chunk is written again."""
    max_transfers: int = 1024
    """Hand-offs alive at once in one process."""
    sweep_s: float = 0.1
    """Period of the reaper."""
    connect_s: float = 2.0
    """Most time to reach a peer and exchange HELLOs."""
    max_backoff_s: float = 2.0
    """Longest pause between two dials of a peer that does not answer."""
    forget_s: float = 60.0
    """A peer without hand-offs that has not answered this long is dialled no more."""

    @property
    def renew_s(self) -> float:
        """Period of RENEW: several in one lease, so that a late one does no harm."""
        return self.lease_s / 4
