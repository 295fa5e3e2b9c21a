"""Places for blocks in host memory, by content name: which are free, which are in use, which to give up first.

A place is *coming* (a step under way fills it from the pool), *fetching* (a disk fills it) or *ready*. A place that
is read or written outside of a step's own order is pinned. Places that are ready and not pinned form a line, least
recently used first. A *leaving* place is being written to disk and is free afterwards, unless it is used before.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tandem.errors import InvariantError
from tandem.values.ids import BlockHash


class PlaceState(Enum):
    """State of a place's content."""

    COMING = "coming"
    FETCHING = "fetching"
    READY = "ready"


@dataclass(slots=True, kw_only=True, eq=False)
class HostPlace:
    """One block-sized piece of host memory in use."""

    name: BlockHash
    slot: int
    state: PlaceState
    num_pins: int = 0
    is_leaving: bool = False
    is_forgotten: bool = False
    """True when no name leads to it any more; it is free once the last pin is gone."""
    came_from_disk: bool = False
    """True until the block is used, if it was read from disk."""


class HostPlaces:
    """A fixed set of places; every operation is O(1)."""

    __slots__ = ("_evictable", "_free", "_in_use", "_names", "_slots", "num_fetching", "num_leaving")

    def __init__(self, slots: range) -> None:
        self._slots = slots
        self._free = list(reversed(slots))
        self._names: dict[BlockHash, HostPlace] = {}
        self._in_use: dict[int, HostPlace] = {}
        self._evictable: OrderedDict[BlockHash, HostPlace] = OrderedDict()
        self.num_leaving = 0
        self.num_fetching = 0

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[HostPlace]:
        return iter(self._names.values())

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_pins(self) -> int:
        """Pins on all places together; O(places in use)."""
        return sum(place.num_pins for place in self._in_use.values())

    @property
    def num_free(self) -> int:
        """Number of free places."""
        return len(self._free)

    def get(self, name: BlockHash) -> HostPlace | None:
        """The place that holds, or will hold, the block of that name; None when there is none."""
        return self._names.get(name)

    def at(self, slot: int) -> HostPlace:
        """The place in use at a slot. Raises InvariantError when it is free."""
        place = self._in_use.get(slot)
        if place is None:
            raise InvariantError(f"place {slot} is free")
        return place

    def allocate(self, name: BlockHash, state: PlaceState) -> HostPlace:
        """Use a free place, pinned until it is filled. Raises InvariantError if none is free, or the name has one."""
        if not self._free or name in self._names or state is PlaceState.READY:
            raise InvariantError("no free place, or the block has one")
        place = HostPlace(name=name, slot=self._free.pop(), state=state, num_pins=1)
        self._names[name] = self._in_use[place.slot] = place
        self.num_fetching += state is PlaceState.FETCHING
        return place

    def filled(self, place: HostPlace) -> None:
        """Mark a place as ready, and release its filler's pin."""
        self.num_fetching -= place.state is PlaceState.FETCHING
        place.state = PlaceState.READY
        self.unpin(place)

    def pin(self, place: HostPlace) -> None:
        """Keep a place while it is read or written."""
        place.num_pins += 1
        self._evictable.pop(place.name, None)

    def unpin(self, place: HostPlace) -> None:
        """Undo one `pin`: the last makes the place the most recently used, or free if it was forgotten."""
        if not place.num_pins:
            raise InvariantError(f"place {place.slot} is not pinned")
        place.num_pins -= 1
        self._settle(place)

    def touch(self, place: HostPlace) -> None:
        """Make a place the most recently used; a leaving one stays."""
        if place.is_leaving:
            place.is_leaving = False
            self.num_leaving -= 1
        if place.name in self._evictable:
            self._evictable.move_to_end(place.name)

    def leave(self, place: HostPlace) -> None:
        """Pin a ready place for its copy to disk; it is to be free after that."""
        self.pin(place)
        place.is_leaving = True
        self.num_leaving += 1

    def oldest(self) -> HostPlace | None:
        """The least recently used place that is ready and not pinned; None when there is none."""
        return next(iter(self._evictable.values()), None)

    def forget(self, place: HostPlace) -> None:
        """Remove the block's name; its place is free as soon as it is no longer pinned."""
        del self._names[place.name]
        self._evictable.pop(place.name, None)
        place.is_forgotten = True
        self._settle(place)

    def _settle(self, place: HostPlace) -> None:
        if place.num_pins:
            return
        if place.is_forgotten:
            self.num_leaving -= place.is_leaving
            self.num_fetching -= place.state is PlaceState.FETCHING
            del self._in_use[place.slot]
            self._free.append(place.slot)
        elif place.state is PlaceState.READY:
            self._evictable[place.name] = place

    def check_invariants(self) -> None:
        """Raise InvariantError unless every place is free or in use, and in line exactly when it may be given up."""
        used = [*self._free, *self._in_use]
        if sorted(used) != list(self._slots):
            raise InvariantError("a place was lost, or is free and in use")
        for slot, place in self._in_use.items():
            if place.slot != slot or place.is_forgotten == (self._names.get(place.name) is place):
                raise InvariantError(f"place {slot} is found under another name")
            waits = place.state is PlaceState.READY and not place.num_pins and not place.is_forgotten
            if waits != (self._evictable.get(place.name) is place):
                raise InvariantError(f"place {slot} is wrongly in line, or wrongly not")
        if self._evictable.keys() - self._names.keys() or len(self._names) > len(self._in_use):
            raise InvariantError("a name has no place")
        leaving = sum(place.is_leaving for place in self._in_use.values())
        fetching = sum(place.state is PlaceState.FETCHING for place in self._in_use.values())
        if (leaving, fetching) != (self.num_leaving, self.num_fetching):
            raise InvariantError("places that leave or are fetched are miscounted")
