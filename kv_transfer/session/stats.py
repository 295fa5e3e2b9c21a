"""Counters of one hub, read by its worker's metrics."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kv_transfer.session.peer_rates import FadingRate


class AttemptOutcome(Enum):
    """How one attempt at a transfer ended; every attempt has exactly one outcome."""

    COMMITTED = "committed"
    FAILED = "failed"
    """Something broke or was refused, here or at the peer."""
    EXPIRED = "expired"
    """A lease or a deadline of this side ended."""
    CANCELLED = "cancelled"
    """The attempt was no longer wanted. The sender sees only that the receiver gave it up or, during a write, that the
    write failed: rely on the receiver's count."""


class EndKey(NamedTuple):
    """Labels under which ended attempts are counted."""

    is_fetch: bool
    transport: str
    """"" when the peer was never reached."""
    outcome: AttemptOutcome


@dataclass(slots=True, kw_only=True)
class TransferTotals:
    """Totals over attempts; `seconds` is the time that `num_bytes` took."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    chunks: int = 0
    nacks: int = 0
    """Chunks that arrived damaged."""

    def add(self, other: "TransferTotals") -> None:
        self.count += other.count
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.chunks += other.chunks
        self.nacks += other.nacks


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Totals since start, running attempts included, and current gauges."""

    num_bytes: int = 0
    """Receiver: bytes of chunks that were verified. Sender: bytes of writes that succeeded."""
    seconds: float = 0.0
    """Duration of the writes of those bytes by the sender's clock, its checksums included."""
    chunks: int = 0
    nacks: int = 0
    started: int = 0
    """Attempts that were started."""
    bad_messages: int = 0
    live: int = 0
    """Gauge: attempts not yet closed."""
    quarantined_blocks: int = 0
    """Gauge: blocks whose writer may still be running."""
    ended: dict[EndKey, TransferTotals] = field(default_factory=dict)
    """Totals of the attempts that have ended."""
    _recent: FadingRate = field(default_factory=FadingRate, repr=False)

    def count_chunk(self, num_bytes: int, seconds: float) -> None:
        """Count a chunk that arrived, or was written, in `seconds`."""
        self.chunks += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        self._recent.observe(num_bytes, seconds)

    @property
    def bytes_per_s(self) -> float:
        """Recent rate of single writes; 0 before the first chunk."""
        return self._recent.bytes_per_s

    @property
    def committed(self) -> int:
        return self._num_ended(AttemptOutcome.COMMITTED)

    @property
    def failed(self) -> int:
        return self._num_ended(AttemptOutcome.FAILED)

    @property
    def expired(self) -> int:
        return self._num_ended(AttemptOutcome.EXPIRED)

    @property
    def cancelled(self) -> int:
        """Attempts that were cancelled."""
        return self._num_ended(AttemptOutcome.CANCELLED)

    def _num_ended(self, outcome: AttemptOutcome) -> int:
        return sum(totals.count for key, totals in self.ended.items() if key.outcome is outcome)


class AttemptTally:
    """One attempt's share of its hub's totals."""

    def __init__(self, stats: TransferStats, *, is_fetch: bool) -> None:
        stats.started += 1
        self.totals = TransferTotals()
        self.outcome: AttemptOutcome | None = None
        self._stats = stats
        self._is_fetch = is_fetch
        self._transport = ""

    def chunk(self, num_bytes: int, seconds: float) -> None:
        """Count a chunk that arrived, or was written, in `seconds`."""
        self._stats.count_chunk(num_bytes, seconds)
        self._add(TransferTotals(num_bytes=num_bytes, seconds=seconds, chunks=1))

    def nack(self) -> None:
        """Count a chunk that arrived damaged."""
        self._stats.nacks += 1
        self._add(TransferTotals(nacks=1))

    def end(self, outcome: AttemptOutcome, transport: str) -> None:
        """End the attempt; only the first call counts. Writes still in flight are added to it as they end."""
        if self.outcome is None:
            self.outcome, self._transport = outcome, transport
            self.totals.count = 1
            self._ended().add(self.totals)

    def _add(self, more: TransferTotals) -> None:
        self.totals.add(more)
        if self.outcome is not None:
            self._ended().add(more)

    def _ended(self) -> TransferTotals:
        if self.outcome is None:
            raise ValueError("the attempt has not ended yet")
        key = EndKey(self._is_fetch, self._transport, self.outcome)
        return self._stats.ended.setdefault(key, TransferTotals())
