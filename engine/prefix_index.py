"""Which full blocks can be found by content, and which of them to give up first.

One physical block per name. An entry is *parked* while nobody references its block: it is a cache entry, evictable
in least-recently-used order. Three facts hold together (`check_invariants`):

1. an entry's parent is a chain's root or an entry;
2. a referenced entry's parent is referenced (a table holds all its blocks, and always the canonical ones);
3. a parked child is older in the LRU order than its parked parent (tables are released tail first).

So the oldest parked entry is always a leaf, and eviction never cuts a chain in the middle, at O(1) and without
child counts.
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.kv_events import Cleared, Evicted, KVEventLog, Stored
from tandem.errors import InvariantError
from tandem.ids import BlockHash, BlockId


@dataclass(slots=True, kw_only=True)
class _Entry:
    block: BlockId
    parent: BlockHash
    is_first: bool
    """The parent is the chain's root, which is no block."""


class PrefixIndex:
    """Names of full blocks to physical blocks."""

    __slots__ = ("_entries", "_names", "_parked", "events")

    def __init__(self, events: KVEventLog) -> None:
        self.events = events
        # Insertion order is topological: a parent is always stored before its children (fact 1).
        self._entries: dict[BlockHash, _Entry] = {}
        self._names: dict[BlockId, BlockHash] = {}
        # A dict would do but for its front: finding the oldest after many removals is O(n) there.
        self._parked: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_parked(self) -> int:
        """Entries that may be evicted."""
        return len(self._parked)

    def find(self, name: BlockHash) -> BlockId | None:
        """The canonical block of a name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.block

    def holds(self, block: BlockId) -> bool:
        """Whether `block` is some name's canonical block."""
        return block in self._names

    def is_parked(self, name: BlockHash) -> bool:
        """Whether the name's block is unreferenced."""
        return name in self._parked

    def insert(self, name: BlockHash, block: BlockId, *, parent: BlockHash, is_first: bool) -> None:
        """Make a referenced block findable; unless it is its chain's first, its parent must already be here."""
        if name in self._entries or block in self._names:
            raise InvariantError(f"block {block} or its name is already indexed")
        if not is_first and parent not in self._entries:
            raise InvariantError(f"block {block}: its parent is not indexed")
        self._entries[name] = _Entry(block=block, parent=parent, is_first=is_first)
        self._names[block] = name
        self.events.append(Stored(name=name, parent=parent))

    def rebind(self, name: BlockHash, block: BlockId) -> BlockId:
        """Let a referenced block take over a parked name; returns the block that had it, now nobody's."""
        entry = self._entries[name]
        del self._parked[name]
        former, entry.block = entry.block, block
        del self._names[former]
        self._names[block] = name
        return former

    def park(self, block: BlockId) -> None:
        """The block lost its last reference: it becomes the most recently used cache entry."""
        self._parked[self._names[block]] = None

    def unpark(self, block: BlockId) -> None:
        """The block got a reference again."""
        del self._parked[self._names[block]]

    def evict(self) -> BlockId:
        """Forget the least recently used parked entry, a leaf; returns its block."""
        if not self._parked:
            raise InvariantError("nothing to evict")
        name, _ = self._parked.popitem(last=False)
        block = self._entries.pop(name).block
        del self._names[block]
        self.events.append(Evicted(name=name))
        return block

    def clear(self) -> list[BlockId]:
        """Forget every parked entry; returns their blocks. Entries in use stay and are announced again."""
        blocks = [self._entries.pop(name).block for name in self._parked]
        self._parked.clear()
        for block in blocks:
            del self._names[block]
        self.events.append(Cleared())
        for name, entry in self._entries.items():
            self.events.append(Stored(name=name, parent=entry.parent))
        return blocks

    def snapshot(self) -> tuple[int, list[Stored]]:
        """The number of the next event, and the whole content, parents first, that it will follow upon."""
        return self.events.next_seq, [Stored(name=n, parent=e.parent) for n, e in self._entries.items()]

    def check_invariants(self) -> None:
        """Verify the three facts of the module; O(entries), for tests and audits."""
        age = {name: position for position, name in enumerate(self._parked)}
        if len(self._names) != len(self._entries) or not age.keys() <= self._entries.keys():
            raise InvariantError("names and entries differ")
        for name, entry in self._entries.items():
            if self._names.get(entry.block) != name:
                raise InvariantError(f"block {entry.block} is not indexed under the name that points at it")
            if entry.parent not in self._entries:
                if not entry.is_first:
                    raise InvariantError(f"block {entry.block}: its parent is not indexed")
            elif name not in age and entry.parent in age:
                raise InvariantError(f"block {entry.block} is referenced but its parent is not")
            elif name in age and entry.parent in age and age[name] > age[entry.parent]:
                raise InvariantError(f"block {entry.block} would be evicted after its parent")
