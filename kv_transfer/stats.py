"""Counters of one hub, read by its worker's metrics."""

from dataclasses import dataclass, field

_WEIGHT = 1 / 16
"""Of the newest chunk in `bytes_per_s`: old news fades within some tens of chunks."""


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Totals since start, and gauges of now."""

    num_bytes: int = 0
    """Receiver: of chunks that were verified. Sender: of writes that succeeded."""
    seconds: float = 0.0
    """What the writes of just those bytes took, by the sender's clock, its checksums included."""
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
    _recent_bytes: float = field(default=0.0, repr=False)
    _recent_s: float = field(default=0.0, repr=False)

    def count_chunk(self, num_bytes: int, seconds: float) -> None:
        """One chunk has arrived, or was written, in `seconds`."""
        self.chunks += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        if seconds > 0.0:  # else its time is not known, and its bytes alone would raise the rate
            self._recent_bytes += _WEIGHT * (num_bytes - self._recent_bytes)
            self._recent_s += _WEIGHT * (seconds - self._recent_s)

    @property
    def bytes_per_s(self) -> float:
        """Rate of one write, as averages of bytes and seconds that fade exponentially; 0 before the first chunk."""
        return self._recent_bytes / self._recent_s if self._recent_s > 0.0 else 0.0
