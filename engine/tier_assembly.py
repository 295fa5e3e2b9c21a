"""Assembles the tiers below the KV pool, host memory and disk, from the configuration, and shuts them down."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from engine.kv_cache.tiers.cache import CacheTiers, TierSpec
from engine.kv_cache.tiers.disk import DiskSpec
from engine.kv_storage.block_file import CacheIdentity
from engine.kv_storage.disk_store import DiskStore, file_bytes
from engine.runner.block_mover import BlockMover
from tandem.errors import ConfigError
from tandem.process.host_memory import HostRoom
from tandem.values.disk_cache import contradiction
from tandem.values.kv_layout import KVLayout

MAX_DISK_BLOCKS = 1 << 18
"""Limit on blocks on disk: each is a file, and its name is kept in memory here and at every router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Configured sizes of the tiers below the pool."""

    offload_bytes: int = 0
    """Bytes of host memory for preempted requests."""
    host_cache_bytes: int = 0
    """Bytes of host memory for evicted blocks."""
    disk_cache_bytes: int = 0
    disk_cache_path: Path | None = None

    @property
    def in_memory(self) -> tuple[tuple[str, int], ...]:
        """Sizes of the tiers in host memory, as pairs of setting name and bytes."""
        return ("offload_bytes", self.offload_bytes), ("host_cache_bytes", self.host_cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """Slots in host memory, the same on every rank: preempted requests' first, then the cache's."""

    num_offload: int = 0
    num_cache: int = 0

    @property
    def num_slots(self) -> int:
        return self.num_offload + self.num_cache

    @property
    def cache(self) -> range:
        """Slots of the cache."""
        return range(self.num_offload, self.num_slots)


def host_slots(sizes: TierSizes, layout: KVLayout, rooms: Sequence[HostRoom], *, num_nodes: int = 1) -> HostSlots:
    """Count the blocks that the configured sizes hold, over all ranks; each machine holds its own ranks' parts.

    Raises ConfigError, also when a size exceeds the free memory of one of the machines.
    """
    _check_disk(sizes, layout)
    for room in rooms:
        _check_room(sizes, room, num_nodes)
    for field, num_bytes in sizes.in_memory:
        if 0 < num_bytes < layout.worker_block_bytes:
            raise ConfigError(f"engine.{field} is {num_bytes}; one KV block takes {layout.worker_block_bytes}")
    return HostSlots(
        num_offload=sizes.offload_bytes // layout.worker_block_bytes,
        num_cache=sizes.host_cache_bytes // layout.worker_block_bytes,
    )


def _check_room(sizes: TierSizes, room: HostRoom, num_nodes: int) -> None:
    free_bytes = room.free_bytes
    for field, num_bytes in sizes.in_memory:
        part = -(-num_bytes // num_nodes)
        if part > free_bytes:
            share = "" if num_nodes == 1 else f", {part} of it on each of {num_nodes} nodes"
            whose = f" at {room.where}" if room.where else ""
            raise ConfigError(f"engine.{field} is {num_bytes}{share}; {free_bytes} bytes of memory are free{whose}")
        free_bytes -= part


def _check_disk(sizes: TierSizes, layout: KVLayout) -> None:
    reason = contradiction(
        has_path=sizes.disk_cache_path is not None,
        disk_cache_bytes=sizes.disk_cache_bytes,
        host_cache_bytes=sizes.host_cache_bytes,
        num_ranks=layout.tp_size,
    )
    if reason is not None:
        raise ConfigError(reason)
    if 0 < sizes.disk_cache_bytes < file_bytes(layout.block_bytes):
        raise ConfigError(
            f"engine.disk_cache_bytes is {sizes.disk_cache_bytes}; one KV block takes {file_bytes(layout.block_bytes)}"
        )


def open_disk(sizes: TierSizes, mover: BlockMover, identity: CacheIdentity) -> tuple[DiskStore, DiskSpec] | None:
    """Open a folder of the path and load its index; None without a path. Raises ConfigError."""
    if sizes.disk_cache_path is None:
        return None
    store = DiskStore(sizes.disk_cache_path, identity=identity, place=mover.place)
    capacity = min(MAX_DISK_BLOCKS, sizes.disk_cache_bytes // file_bytes(identity.block_bytes))
    found = store.find(capacity)
    return store, DiskSpec(port=store, capacity=capacity, names=found.names, num_damaged=found.num_removed)


def tier_spec(slots: HostSlots, mover: BlockMover, layout: KVLayout, disk: DiskSpec | None) -> TierSpec | None:
    """Specification of the cache below the pool; None when it has no slots."""
    if not slots.num_cache:
        return None
    return TierSpec(
        slots=slots.cache,
        block_bytes=layout.block_bytes,
        copier=mover,
        moves_between_steps=layout.tp_size == 1,
        disk=disk,
    )


def keep_cached(tiers: CacheTiers, disk: DiskStore, *, timeout_s: float) -> None:
    """Write cached blocks that are not on disk yet to disk for a later process, as many as `timeout_s` allows.

    Call it when the engine has stopped, before the disk is closed. A chain is of no use without its beginning.
    """
    until_s = monotonic() + timeout_s
    for name in tiers.unsaved():
        while not tiers.save(name):
            disk.wait_writes(until_s - monotonic())
            tiers.collect()
            if monotonic() >= until_s:
                return
    while tiers.is_writing and monotonic() < until_s:
        disk.wait_writes(until_s - monotonic())
        tiers.collect()
