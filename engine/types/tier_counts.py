"""Counters and gauges of the cache tiers below the pool, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Blocks moved between the pool and host memory since start: bytes, and seconds spent on these moves alone."""

    saved_bytes: int = 0
    save_s: float = 0.0
    loaded_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """One tier: gauges as of now, totals since start."""

    tier: str
    """`host` or `disk`."""
    num_blocks: int
    capacity_blocks: int
    hits: int = 0
    """Prompt blocks that an admitted request found here and not in a nearer tier."""
    misses: int = 0
    """Full prompt blocks that were looked for here, but found in a tier farther away or computed."""
    stores: int = 0
    evictions: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    """Time spent storing these bytes, and nothing else."""
    loaded_bytes: int = 0
    load_s: float = 0.0
    """Time spent loading these bytes, checksums included, and nothing else."""
    dropped: int = 0
    """Blocks not stored here though they should have been: no room, a slow or full disk, or no copier."""
    damaged: int = 0
    """Copies that were thrown away unused: damaged, cut short, or of another cache."""
    late: int = 0
    """Requests that stopped waiting for a read and computed instead."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running totals of one tier; see TierCounts."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    loaded_bytes: int = 0
    load_s: float = 0.0
    dropped: int = 0
    damaged: int = 0

    def counts(self, tier: str, *, num_blocks: int, capacity_blocks: int) -> TierCounts:
        return TierCounts(
            tier=tier,
            num_blocks=num_blocks,
            capacity_blocks=capacity_blocks,
            hits=self.hits,
            misses=self.misses,
            stores=self.stores,
            evictions=self.evictions,
            stored_bytes=self.stored_bytes,
            store_s=self.store_s,
            loaded_bytes=self.loaded_bytes,
            load_s=self.load_s,
            dropped=self.dropped,
            damaged=self.damaged,
        )
