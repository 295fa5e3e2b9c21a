"""Memory that a machine of a worker has left for KV that leaves the pool. Plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Of one machine, once the ranks there have their weights."""

    free_bytes: int
    where: str = ""
    """Whose machine it is, for errors; empty: this one."""
