"""Eviction policies for cached blocks: three behind one Protocol, all of which evict leaves only.

- `lru`: the least recently used, O(1).
- `lfu`: the least often used, where use ages: LFU with dynamic aging (Arlitt et al., "Evaluating content management
  techniques for Web proxy caches", 2000).
- `prefix`: the block with the lowest expected saving: GreedyDual (Cao and Irani, "Cost-aware WWW proxy caching
  algorithms", 1997) where a block's worth grows with the requests that shared it and falls with its distance from the
  root, since a deep block helps only requests that share its whole prefix.

A policy sees parked entries only, those without references; `engine.kv_cache.prefix_index` owns the entries. The tiers
below the pool evict the least recently used: `engine.kv_cache.tiers.cache`, `engine.kv_cache.tiers.disk_index`.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Protocol

from tandem.errors import ConfigError, InvariantError
from tandem.values.ids import BlockHash, BlockId


@dataclass(slots=True, kw_only=True, eq=False)
class IndexedBlock:
    """A cached block that can be found by its name."""

    name: BlockHash
    block: BlockId
    parent: BlockHash
    is_first: bool
    """True when the parent is the chain's root, which is no block."""
    depth: int
    """Number of blocks before it in its chain."""
    num_uses: int = 1
    """Requests that computed or found it, in total."""
    num_children: int = 0
    """Number of entries whose parent it is."""
    is_parked: bool = False
    parked_at: int = 0
    """When it was parked last, on its owner's count."""
    floor: float = 0.0
    """The policy's age mark, taken when the entry was last used."""


class EvictionPolicy(Protocol):
    """An order of the parked entries in which a child always comes before its parent."""

    def park(self, entry: IndexedBlock) -> None:
        """Add an entry that lost its last reference. The tail of a table is parked before its head."""
        ...

    def unpark(self, entry: IndexedBlock) -> None:
        """Remove a parked entry that is referenced again."""
        ...

    def became_leaf(self, entry: IndexedBlock) -> None:
        """Note that a parked entry's last child was evicted."""
        ...

    def next(self) -> BlockHash:
        """The parked leaf that `evict` would choose now. Raises InvariantError when there is none."""
        ...

    def evict(self) -> BlockHash:
        """Choose a parked leaf and forget it. Raises InvariantError when there is none."""
        ...

    def clear(self) -> None: ...

    def hottest_first(self) -> Iterable[BlockHash]:
        """All parked leaves, and perhaps other entries, last evicted first; O(n log n) at most."""
        ...

    def check(self, parked: Mapping[BlockHash, IndexedBlock]) -> None:
        """Raise InvariantError unless exactly `parked` are known and every child would be evicted before its parent."""
        ...


class LeastRecentlyUsed:
    """Order of parking. Tables are released tail first, so the oldest parked entry is always a leaf: no search."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        # Not a dict: finding its oldest key after many removals is O(n).
        self._order: OrderedDict[BlockHash, None] = OrderedDict()

    def park(self, entry: IndexedBlock) -> None:
        self._order[entry.name] = None

    def unpark(self, entry: IndexedBlock) -> None:
        del self._order[entry.name]

    def became_leaf(self, entry: IndexedBlock) -> None:
        """Do nothing: the entry's place in the order is right already."""

    def next(self) -> BlockHash:
        if not self._order:
            raise InvariantError("nothing to evict")
        return next(iter(self._order))

    def evict(self) -> BlockHash:
        if not self._order:
            raise InvariantError("nothing to evict")
        return self._order.popitem(last=False)[0]

    def clear(self) -> None:
        self._order.clear()

    def hottest_first(self) -> Iterable[BlockHash]:
        return reversed(self._order)

    def check(self, parked: Mapping[BlockHash, IndexedBlock]) -> None:
        age = {name: position for position, name in enumerate(self._order)}
        if age.keys() != parked.keys():
            raise InvariantError("the eviction order and the parked entries differ")
        for name, entry in parked.items():
            if age[name] > age.get(entry.parent, age[name]):
                raise InvariantError(f"block {entry.block} would be evicted after its parent")


Worth = Callable[[IndexedBlock], float]
"""Worth of keeping a parked leaf, from its own history alone."""


class LeastWorth:
    """Greedy-dual order over the parked leaves: O(log n) each.

    A leaf's key is its worth plus the highest key evicted before it was last used (not before it became a leaf, or
    the beginnings of dead chains would grow young again as their ends go). So the keys of entries never used again are
    overtaken in time, however high they once were, and no clock is needed.
    """

    __slots__ = ("_floor", "_heap", "_serial", "_serials", "_worth")

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self._floor = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, BlockHash]] = []
        # A heap item is valid only while it carries its entry's current serial.
        self._serials: dict[BlockHash, int] = {}

    def park(self, entry: IndexedBlock) -> None:
        entry.floor = self._floor
        if not entry.num_children:
            self.became_leaf(entry)

    def unpark(self, entry: IndexedBlock) -> None:
        self._serials.pop(entry.name, None)
        if len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [item for item in self._heap if self._serials.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def became_leaf(self, entry: IndexedBlock) -> None:
        self._serial += 1
        self._serials[entry.name] = self._serial
        heapq.heappush(self._heap, (entry.floor + self._worth(entry), self._serial, entry.name))

    def next(self) -> BlockHash:
        while self._heap:
            _, serial, name = self._heap[0]
            if self._serials.get(name) == serial:
                return name
            heapq.heappop(self._heap)
        raise InvariantError("nothing to evict")

    def evict(self) -> BlockHash:
        name = self.next()
        key, _, _ = heapq.heappop(self._heap)
        del self._serials[name]
        self._floor = max(self._floor, key)
        return name

    def clear(self) -> None:
        self._heap.clear()
        self._serials.clear()

    def hottest_first(self) -> Iterable[BlockHash]:
        live = [item for item in self._heap if self._serials.get(item[2]) == item[1]]
        return (name for _, _, name in sorted(live, reverse=True))

    def check(self, parked: Mapping[BlockHash, IndexedBlock]) -> None:
        live = {name for _, serial, name in self._heap if self._serials.get(name) == serial}
        leaves = {name for name, entry in parked.items() if not entry.num_children}
        if live != self._serials.keys() or live != leaves:
            raise InvariantError("the evictable entries are not the parked leaves")


def frequency(entry: IndexedBlock) -> float:
    """Worth under LFU: every use counts the same."""
    return float(entry.num_uses)


def shared_prefix(entry: IndexedBlock) -> float:
    """Worth by uses, discounted by depth: a deep block helps only requests that share its whole prefix."""
    return entry.num_uses / (1.0 + log2(1.0 + entry.depth))


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": lambda: LeastWorth(frequency),
    "prefix": lambda: LeastWorth(shared_prefix),
}


def eviction_policy(name: str) -> EvictionPolicy:
    """Create a policy by name; ConfigError for an unknown one."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"engine.eviction must be one of {', '.join(POLICIES)}, not {name!r}")
    return make()
