"""The cache below the pool: evicted blocks go down to host memory and on to disk; found again, they come up. Pure.

- Down: a block that the pool evicts is copied by the batch that reuses it (`BlockOffload`) or, outside batches, at
  once. Host memory gives up its least recently used block, to the disk if there is one (`engine.kv_cache.tiers.disk`).
- Up: after the prefix found in the pool the chain is followed by name. Blocks on disk are read into host memory while
  their request waits in the queue, for a bounded time, letting others pass; blocks in host memory are loaded into the
  request's new blocks (`BlockLoad`) by the batch that admits it. Both only where the measured rates say that it
  takes less time than computing (`engine.kv_cache.tiers.costs`).

A name stays published to the cluster while any tier can serve it: `Evicted` is sent when the last tier drops it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.eviction import IndexedBlock
from engine.kv_cache.lower_tiers import BlockCopier
from engine.kv_cache.tiers.costs import TierCosts
from engine.kv_cache.tiers.disk import DiskSpec, DiskTier
from engine.kv_cache.tiers.disk_waits import DiskWaits
from engine.kv_cache.tiers.host import HostPlace, HostPlaces, PlaceState
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.kv_events import Evicted
from engine.types.request import Request
from engine.types.tier_counts import Tally, TierCounts
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """Configuration of the tiers below the pool."""

    slots: range
    """The runner's places in host memory that are reserved for cached blocks."""
    block_bytes: int
    """Size of one block over all layers, on one rank: ranks copy their shares in parallel."""
    copier: BlockCopier
    moves_between_steps: bool = True
    """True when blocks can be copied while no step is launched: not with several ranks."""
    disk: DiskSpec | None = None


class _Moves(NamedTuple):
    """Places that one batch fills and reads."""

    stores: list[HostPlace]
    loads: list[HostPlace]


class CacheTiers:
    """The cache tiers of one worker below its pool. Touched by the engine thread alone."""

    def __init__(self, blocks: BlockManager, spec: TierSpec) -> None:
        self.costs = TierCosts(block_bytes=spec.block_bytes, block_tokens=blocks.block_size)
        self._blocks = blocks
        self._copier = spec.copier
        self._moves_between_steps = spec.moves_between_steps
        self._host = HostPlaces(spec.slots)
        self._tally = Tally()
        self._disk: DiskTier | None = None
        if spec.disk is not None:
            self._disk = DiskTier(spec.disk, self._host, self.costs, give_up=self._give_up, left=self._note_dropped)
        self._offloads: list[BlockOffload] = []
        self._moves = _Moves([], [])
        """Moves of the batch that is being planned."""
        self._launched: deque[_Moves] = deque()
        self._waits = DiskWaits()
        # Of more names than places, some would have left already.
        self._unwritten: deque[BlockHash] = deque(maxlen=max(1, len(spec.slots)))

    @property
    def capacity_blocks(self) -> int:
        """Room of all tiers together; constant."""
        return self._host.num_slots + (0 if self._disk is None else self._disk.capacity)

    # Down

    def demote(self, entry: IndexedBlock) -> bool:
        name = entry.name
        place = self._host.get(name)
        if place is not None:
            self._host.touch(place)
            return True
        if self.costs.prefers_store():
            if self._make_room():
                place = self._host.allocate(name, PlaceState.COMING)
                self._moves.stores.append(place)
                self._offloads.append(BlockOffload(entry.block, place.slot))
                return True
            self._tally.dropped += 1
        return self._disk is not None and name in self._disk

    def save_now(self) -> None:
        """See LowerCache. With several ranks it is impossible: demoted blocks are then lost, and counted as dropped."""
        if not self._offloads:
            return
        if self._moves_between_steps:
            self._copier.move_now(self._offloads, ())
            self._filled(self._moves.stores)
            self._offloads.clear()
            self._moves.stores.clear()
        else:
            self._tally.dropped += len(self._offloads)
            self.cancel()

    def take_offloads(self) -> tuple[BlockOffload, ...]:
        """Return the offloads for the batch that is being planned, and record its moves as launched."""
        offloads = tuple(self._offloads)
        self._offloads.clear()
        self._launched.append(self._moves)
        self._moves = _Moves([], [])
        return offloads

    def cancel(self) -> None:
        """Drop the planned stores: no batch is launched that could execute them."""
        if self._moves.loads:
            raise InvariantError("a cancelled plan had blocks to load")
        for place in self._moves.stores:
            self._host.forget(place)
            self._host.unpin(place)
            self._note_dropped(place.name)
        self._offloads.clear()
        self._moves = _Moves([], [])

    def on_step_done(self) -> None:
        """Account for the oldest launched batch, which is done: its stores are readable, its loads unpinned."""
        moves = self._launched.popleft()
        self._filled(moves.stores)
        self._unpin(moves.loads)

    def _filled(self, stores: Sequence[HostPlace]) -> None:
        self._tally.stores += len(stores)
        for place in stores:
            self._host.filled(place)
            if self._disk is not None and not place.is_forgotten:
                self._unwritten.append(place.name)

    def _unpin(self, loads: Sequence[HostPlace]) -> None:
        # Tails first, so that the beginning of a chain is given up last.
        for place in reversed(loads):
            self._host.unpin(place)

    def _make_room(self) -> bool:
        """Make sure that a place is free, giving up the least recently used block; False when all are being moved."""
        if not self._host.num_free:
            oldest = self._host.oldest()
            if oldest is None:
                return False
            if self._disk is not None and oldest.name not in self._disk:
                self._disk.tally.dropped += 1
            self._give_up(oldest)
        return True

    def _give_up(self, place: HostPlace) -> None:
        self._tally.evictions += 1
        self._host.forget(place)
        self._note_dropped(place.name)

    def _note_dropped(self, name: BlockHash) -> None:
        """Note that one tier has dropped a name; publish `Evicted` when no other tier holds it."""
        is_below = self._host.get(name) is not None or (self._disk is not None and name in self._disk)
        if not is_below and self._blocks.index.find(name) is None:
            self._blocks.index.events.append(Evicted(name))

    def forget(self, name: BlockHash) -> None:
        place = self._host.get(name)
        if place is not None:
            self._host.forget(place)
        if self._disk is not None:
            self._disk.forget(name)

    def clear(self) -> None:
        for place in list(self._host):
            self._host.forget(place)
        if self._disk is not None:
            self._disk.clear()

    def names(self) -> Iterator[BlockHash]:
        for place in self._host:
            yield place.name
        for name in self._disk or ():
            if self._host.get(name) is None:
                yield name

    # Up

    def collect(self) -> None:
        """Account for finished disk operations and start new ones. Called before every plan."""
        if self._disk is None:
            return
        for name in self._disk.collect():
            self._waits.landed(name)
        while self._host.num_free + self._host.num_leaving < self._disk.max_writes:
            oldest = self._host.oldest()
            if oldest is None:
                return
            if oldest.name in self._disk:
                self._give_up(oldest)
            elif not self._disk.write(oldest, leaves=True):
                return
        self._write_ahead(self._disk)

    def _write_ahead(self, disk: DiskTier) -> None:
        """Copy recently stored places to disk while it is idle, so that they can be given up at once later."""
        while self._unwritten and disk.can_write:
            place = self._host.get(self._unwritten.popleft())
            if place is not None and place.state is PlaceState.READY and not place.num_pins and place.name not in disk:
                disk.write(place, leaves=False)

    def must_wait(self, request: Request, num_found_blocks: int, now: float) -> bool:
        """Whether the request's next blocks are being read from disk and are still worth waiting for.

        `num_found_blocks`: its prefix in the pool, just matched. The first call begins to read.
        """
        if self._disk is None:
            return False
        if request.request_id not in self._waits:
            self._begin_wait(self._disk, request, num_found_blocks, now)
        return request.request_id in self._waits and self._waits.check_wait(request.request_id, now)

    def _begin_wait(self, disk: DiskTier, request: Request, found: int, now: float) -> None:
        run: list[HostPlace] = []
        to_read: list[BlockHash] = []
        fetching: set[BlockHash] = set()
        for i in range(found, self._num_full(request)):
            name = self._blocks.name(request, i)
            place = self._host.get(name)
            if place is not None:
                run.append(place)
                if place.state is PlaceState.FETCHING:
                    fetching.add(name)
            elif name in disk:
                to_read.append(name)
            else:
                break
        if to_read and not self.costs.prefers_fetch():
            to_read.clear()
        if not fetching and not to_read:
            return
        # Blocks found in host memory must not be evicted for those that follow them.
        for place in reversed(run):
            self._host.touch(place)
        for name in to_read:
            if self._host.num_fetching >= disk.max_fetches or not self._make_room():
                break
            disk.fetch(name)
            fetching.add(name)
        if fetching:
            until_s = now + self.costs.patience_s(len(run) + len(to_read))
            self._waits.begin(request.request_id, fetching, until_s=until_s)

    def patience_s(self, now: float) -> float | None:
        return self._waits.patience_s(now)

    def num_loadable_blocks(self, request: Request, num_found_blocks: int, *, between_steps: bool = False) -> int:
        """Count the blocks after the request's prefix in the pool, just matched, that are worth loading from host
        memory.

        `between_steps`: to be loaded by `load_now`, and not by the batch that is being planned.
        """
        if between_steps and not self._moves_between_steps:
            return 0
        count = 0
        for i in range(num_found_blocks, self._num_full(request)):
            place = self._host.get(self._blocks.name(request, i))
            if place is None or place.state is PlaceState.FETCHING:
                break
            if between_steps and place.state is not PlaceState.READY:
                break
            count += 1
        return count if count and self.costs.prefers_load() else 0

    def pin_for_load(self, request: Request, num_found_blocks: int, count: int) -> list[int]:
        """Pin the places of `count` blocks for an admitted request until they are loaded. Returns their slots.

        `count`: at most `num_loadable_blocks`. Call `record_misses` once no more will be loaded.
        """
        first = num_found_blocks
        places: list[HostPlace] = []
        for i in range(first, first + count):
            place = self._host.get(self._blocks.name(request, i))
            if place is None:
                raise InvariantError(f"request {request.request_id}: its blocks went away before they were loaded")
            places.append(place)
        for place in reversed(places):
            self._host.touch(place)
            self._host.pin(place)
        self._moves.loads.extend(places)
        from_disk = self._count_hits(places)
        request.num_disk_tokens = from_disk * self._blocks.block_size
        request.num_host_tokens = (count - from_disk) * self._blocks.block_size
        self.drop(request.request_id)
        return [place.slot for place in places]

    def record_misses(self, request: Request, num_found_blocks: int) -> None:
        """Count the blocks that the request found nowhere. Call it once per request, when nothing more is loaded for
        it.
        """
        num_missed = self._num_full(request) - num_found_blocks
        self._tally.misses += num_missed
        if self._disk is not None:
            self._disk.tally.misses += num_missed

    def load_now(self, loads: Sequence[BlockLoad]) -> None:
        """Execute outside batches the loads for which `pin_for_load` pinned places."""
        self._copier.move_now((), loads)
        self._unpin(self._moves.loads)
        self._moves.loads.clear()

    def drop(self, request_id: RequestId) -> None:
        """End the request's wait for a disk, if it waits."""
        self._waits.drop(request_id)

    def _num_full(self, request: Request) -> int:
        return (request.num_tokens - 1) // self._blocks.block_size

    def _count_hits(self, places: Sequence[HostPlace]) -> int:
        """Count hits and misses for loaded places. Returns the number that came from disk."""
        from_disk = sum(place.came_from_disk for place in places)
        self._tally.hits += len(places) - from_disk
        self._tally.misses += from_disk
        if self._disk is not None:
            self._disk.tally.hits += from_disk
        for place in places:
            place.came_from_disk = False
        return from_disk

    # For a later process

    def unsaved(self) -> list[BlockHash]:
        """Names in the pool and in host memory that are not on disk, parents first; empty without a disk."""
        if self._disk is None:
            return []
        cached = self._blocks.index.names()
        below = [place.name for place in self._host if self._blocks.index.find(place.name) is None]
        # Reversed, since children were evicted into host memory before their parents.
        return [name for name in (*cached, *reversed(below)) if name not in self._disk][: self._disk.capacity]

    def save(self, name: BlockHash) -> bool:
        """Begin to write a block to disk, between steps; False when other writes must end first."""
        place, block = self._host.get(name), self._blocks.index.find(name)
        if self._disk is None or (place is None and block is None) or name in self._disk:
            return True
        if not self._disk.can_write:
            return False
        if place is None and block is not None:
            if not self._moves_between_steps or not self._make_room():
                return True
            place = self._host.allocate(name, PlaceState.COMING)
            self._copier.move_now((BlockOffload(block, place.slot),), ())
            self._filled([place])
        if place is not None and place.state is PlaceState.READY and not place.num_pins:
            self._disk.write(place, leaves=False)
        return True

    @property
    def is_writing(self) -> bool:
        """Whether the disk is still writing."""
        return self._disk is not None and self._disk.is_writing

    # Reporting

    def counts(self) -> tuple[TierCounts, ...]:
        """Counts of each tier, the nearest first."""
        host = self._tally.counts("host", num_blocks=len(self._host), capacity_blocks=self._host.num_slots)
        moved = self._copier.traffic
        host = replace(
            host,
            stored_bytes=moved.saved_bytes,
            store_s=moved.save_s,
            loaded_bytes=moved.loaded_bytes,
            load_s=moved.load_s,
        )
        return (host,) if self._disk is None else (host, replace(self._disk.counts(), late=self._waits.num_late))

    def check_invariants(self) -> None:
        """Raise InvariantError unless bounds hold and each pin is a move's or the disk's; O(places), for audits."""
        self._host.check_invariants()
        if self._disk is not None:
            self._disk.check_invariants()
        if len(self._offloads) != len(self._moves.stores):
            raise InvariantError("places are taken for blocks that no batch saves")
        num_pins = sum(len(moves.stores) + len(moves.loads) for moves in (self._moves, *self._launched))
        if self._host.num_pins != num_pins + (0 if self._disk is None else self._disk.num_pins):
            raise InvariantError("a place is pinned, but by no move and no disk operation")
