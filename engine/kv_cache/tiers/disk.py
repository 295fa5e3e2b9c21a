"""The third tier: blocks evicted from host memory go to disk, and come back into host memory when needed. Pure.

A block is written from its place in host memory while nobody waits: soon after it came there, so that a burst of
others finds places that can be given up at once, and at the latest before its place is to be free. Only so many may be
on their way (`max_writes`): when the disk is slower than that, what host memory needs the room of is lost, and counted.
Before a block is read the caller has made room in host memory.
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
    """A disk that is ready to be used."""

    port: DiskPort
    capacity: int
    """Most blocks, those being written included."""
    names: Sequence[BlockHash] = ()
    """What an earlier process left here, least recently used first."""
    num_damaged: int = 0
    """Files thrown away when these were found."""


class DiskTier:
    """The blocks of one disk, and the places in host memory that it reads or writes now."""

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
        """Places that may be on their way to the disk at once, and those that are to be free or on their way."""
        self.max_fetches = max(1, host.num_slots // 2)
        """Places that may be on their way from it."""
        self._port = spec.port
        self._index = DiskIndex(spec.capacity, spec.names)
        self._host = host
        self._costs = costs
        self._give_up = give_up
        self._left = left

    @property
    def capacity(self) -> int:
        """Number of blocks that the disk tier may hold."""
        return self._index.capacity

    @property
    def can_write(self) -> bool:
        """Whether not as many blocks are on their way as may be."""
        return self._index.num_writing < min(self.max_writes, self._index.capacity)

    @property
    def is_writing(self) -> bool:
        """Whether blocks are on their way."""
        return self._index.num_writing > 0

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._index)

    def write(self, place: HostPlace, *, leaves: bool) -> bool:
        """Begin to copy a ready place, which may leave then; False when as many are on their way as may be."""
        if not self.can_write:
            return False
        gone = self._index.begin(place.name)
        if gone is None:
            return False
        for name in gone:
            self.tally.evictions += 1
            self._port.delete(name)
            self._left(name)
        if leaves:
            self._host.leave(place)
        else:
            self._host.pin(place)
        self._port.write(place.name, place.slot)
        return True

    def fetch(self, name: BlockHash) -> None:
        """Begin to read a block that is here into a free place."""
        place = self._host.allocate(name, PlaceState.FETCHING)
        self._index.touch(name)
        self._port.read(name, place.slot)

    def collect(self) -> list[BlockHash]:
        """Take note of what has ended; the names that were read, or could not be."""
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
            self._costs.read_took(done.num_bytes, done.seconds)
            place.came_from_disk = True
            self._host.filled(place)
            return
        self.tally.damaged += done.verdict is DiskVerdict.DAMAGED
        if not place.is_forgotten:  # else the file may be a later one already
            self.forget(done.name)
            self._host.forget(place)
            self._left(done.name)
        self._host.unpin(place)

    def forget(self, name: BlockHash) -> None:
        """Delete a block, if it is here."""
        if self._index.forget(name):
            self._port.delete(name)

    def clear(self) -> None:
        for name in list(self._index):
            self.forget(name)

    def counts(self) -> TierCounts:
        """What it did and holds."""
        return self.tally.counts("disk", num_blocks=len(self._index), capacity_blocks=self._index.capacity)

    @property
    def num_pins(self) -> int:
        """Places that are read or written now."""
        return self._index.num_writing + self._host.num_fetching

    def check_invariants(self) -> None:
        """InvariantError when the bound is passed; for tests and audits."""
        self._index.check_invariants()
