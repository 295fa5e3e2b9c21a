"""The third tier: blocks evicted from host memory go to disk, and come back into host memory when needed. Pure.

A block is written from its place in host memory while no request waits for it: soon after it was stored there, so that
a burst of others finds places that can be given up at once, and at the latest before its place is needed. At most
`max_writes` are written at once: when the disk is slower, blocks that have to make room are lost, and counted.
Before a block is read, the caller makes room in host memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.kv_cache.tiers.costs import TierCosts
from engine.kv_cache.tiers.disk_index import DiskDone, DiskIndex, DiskJob, DiskPort, DiskVerdict
from engine.kv_cache.tiers.host import HostPlace, HostPlaces, PlaceState
from engine.types.tier_counts import Tally, TierCounts
from tandem.values.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """A disk whose index is loaded and whose port is open."""

    port: DiskPort
    capacity: int
    """Most blocks, those being written included."""
    names: Sequence[BlockHash] = ()
    """Blocks that an earlier process left on disk, least recently used first."""
    num_damaged: int = 0
    """Files that were removed as damaged when the names were loaded."""


class DiskTier:
    """The blocks of one disk, and the places in host memory that are being read or written."""

    def __init__(
        self,
        spec: DiskSpec,
        host: HostPlaces,
        costs: TierCosts,
        *,
        give_up: Callable[[HostPlace], None],
        left: Callable[[BlockHash], None],
    ) -> None:
        """`give_up` receives places that have been copied to disk, `left` every name that this tier has dropped."""
        self.tally = Tally(damaged=spec.num_damaged)
        self.max_writes = max(1, host.num_slots // 4)
        """Most places that may be written to disk at once; also the number of places to keep free or leaving."""
        self.max_fetches = max(1, host.num_slots // 2)
        """Most places that may be read from disk at once."""
        self._port = spec.port
        self._index = DiskIndex(spec.capacity, spec.names)
        self._host = host
        self._costs = costs
        self._give_up = give_up
        self._on_dropped = left

    @property
    def capacity(self) -> int:
        """Number of blocks that the disk tier may hold."""
        return self._index.capacity

    @property
    def can_write(self) -> bool:
        """Whether another write may begin."""
        return self._index.num_writing < min(self.max_writes, self._index.capacity)

    @property
    def is_writing(self) -> bool:
        """Whether any block is being written."""
        return self._index.num_writing > 0

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._index)

    def write(self, place: HostPlace, *, leaves: bool) -> bool:
        """Begin to copy a ready place to disk; `leaves`: to be freed then. False when no write may begin now."""
        if not self.can_write:
            return False
        gone = self._index.begin(place.name)
        if gone is None:
            return False
        for name in gone:
            self.tally.evictions += 1
            self._port.delete(name)
            self._on_dropped(name)
        if leaves:
            self._host.leave(place)
        else:
            self._host.pin(place)
        self._port.write(place.name, place.slot)
        return True

    def fetch(self, name: BlockHash) -> None:
        """Begin to read a block of the disk into a free place."""
        place = self._host.allocate(name, PlaceState.FETCHING)
        self._index.touch(name)
        self._port.read(name, place.slot)

    def collect(self) -> list[BlockHash]:
        """Account for finished operations. Returns the names whose reads have ended, successfully or not."""
        read: list[BlockHash] = []
        for done in self._port.collect():
            if done.job is DiskJob.WRITE:
                self._written(done)
            else:
                self._read(done)
                read.append(done.name)
        return read

    def _written(self, done: DiskDone) -> None:
        place, is_stored = self._host.at(done.slot), done.verdict is DiskVerdict.DONE
        self._index.end(done.name, is_stored=is_stored)
        if is_stored:
            self.tally.stores += 1
            self.tally.stored_bytes += done.num_bytes
            self.tally.store_s += done.seconds
        else:
            self.tally.dropped += 1
        if place.is_forgotten:
            self.forget(done.name)
        elif place.is_leaving:
            self._give_up(place)
        self._host.unpin(place)

    def _read(self, done: DiskDone) -> None:
        place = self._host.at(done.slot)
        if done.verdict is DiskVerdict.DONE:
            self.tally.loaded_bytes += done.num_bytes
            self.tally.load_s += done.seconds
            self._costs.record_read(done.num_bytes, done.seconds)
            place.came_from_disk = True
            self._host.filled(place)
            return
        self.tally.damaged += done.verdict is DiskVerdict.DAMAGED
        if not place.is_forgotten:  # otherwise the file may already be a newer one
            self.forget(done.name)
            self._host.forget(place)
            self._on_dropped(done.name)
        self._host.unpin(place)

    def forget(self, name: BlockHash) -> None:
        """Delete a block, if it is on disk."""
        if self._index.forget(name):
            self._port.delete(name)

    def clear(self) -> None:
        for name in list(self._index):
            self.forget(name)

    def counts(self) -> TierCounts:
        """Counts of this tier since start, and its present content."""
        return self.tally.counts("disk", num_blocks=len(self._index), capacity_blocks=self._index.capacity)

    @property
    def num_pins(self) -> int:
        """Number of places that are being read or written."""
        return self._index.num_writing + self._host.num_fetching

    def check_invariants(self) -> None:
        """Raise InvariantError when the capacity is exceeded; for tests and audits."""
        self._index.check_invariants()
