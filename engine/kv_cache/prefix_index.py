"""Index of full blocks by content, with the order in which to evict them.

One physical block per name. An entry is *parked* while its block has no reference: it is a cache entry, and a policy
(`engine.kv_cache.eviction`) orders the parked ones for eviction. Three facts hold together (`check_invariants`):
1. an entry's parent is a chain's root or an entry;
2. a referenced entry's parent is referenced (a table holds all its blocks, and always the canonical ones);
3. only leaves are evicted: under every policy a parked child goes before its parked parent.

So eviction never cuts a chain in the middle, and both "is it indexed" and "is it parked" change at most once along a
chain: a prefix of n blocks is measured in O(log n) look-ups.
"""

from collections.abc import Callable, Iterable, Iterator

from engine.kv_cache.eviction import EvictionPolicy, IndexedBlock, LeastRecentlyUsed
from engine.types.kv_events import Cleared, Evicted, KVEventLog, Stored
from tandem.errors import InvariantError
from tandem.values.cached_chain import CachedChain
from tandem.values.ids import BlockHash, BlockId


class PrefixIndex:
    """Maps names of full blocks to physical blocks."""

    __slots__ = ("_entries", "_held", "_num_parked", "_policy", "events")

    def __init__(self, events: KVEventLog, policy: EvictionPolicy | None = None) -> None:
        """`policy`: None for least recently used."""
        self.events = events
        self._policy: EvictionPolicy = policy or LeastRecentlyUsed()
        # Insertion order is topological: a parent is always stored before its children (fact 1).
        self._entries: dict[BlockHash, IndexedBlock] = {}
        self._held: dict[BlockId, IndexedBlock] = {}
        self._num_parked = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_parked(self) -> int:
        """Entries that may be evicted, now or once their children are."""
        return self._num_parked

    def find(self, name: BlockHash) -> BlockId | None:
        """The canonical block of a name; None when the name is not indexed."""
        entry = self._entries.get(name)
        return None if entry is None else entry.block

    def holds(self, block: BlockId) -> bool:
        """Whether `block` is the canonical block of a name."""
        return block in self._held

    def chain_to(self, name: BlockHash) -> list[BlockId] | None:
        """Blocks from the chain's root to the block of that name; None when the name is not indexed."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        blocks = [entry.block]
        while not entry.is_first:
            entry = self._entries[entry.parent]
            blocks.append(entry.block)
        blocks.reverse()
        return blocks

    def is_parked(self, name: BlockHash) -> bool:
        """Whether the name is indexed and its block unreferenced."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_parked

    def measure(self, name_of: Callable[[int], BlockHash], num_blocks: int) -> tuple[int, int]:
        """Count, of a chain's first `num_blocks` names, those that are indexed, and those of them that are in use.

        O(log num_blocks), by facts 1 and 2.
        """
        entries = self._entries
        found = _first_false(lambda i: name_of(i) in entries, num_blocks)
        return found, _first_false(lambda i: not entries[name_of(i)].is_parked, found)

    def insert(self, name: BlockHash, block: BlockId, *, parent: BlockHash, is_first: bool) -> None:
        """Make a referenced block findable; unless it is its chain's first, its parent must already be indexed."""
        if name in self._entries or block in self._held:
            raise InvariantError(f"block {block} or its name is already indexed")
        depth = 0
        if not is_first:
            above = self._entries.get(parent)
            if above is None:
                raise InvariantError(f"block {block}: its parent is not indexed")
            above.num_children += 1
            depth = above.depth + 1
        entry = IndexedBlock(name=name, block=block, parent=parent, is_first=is_first, depth=depth)
        self._entries[name] = self._held[block] = entry
        self.events.append(Stored(name, parent))

    def rebind(self, name: BlockHash, block: BlockId) -> BlockId:
        """Let a referenced block take over a parked name. Returns the former block, which has no name now."""
        entry = self._entries[name]
        self._unpark(entry)
        former, entry.block = entry.block, block
        del self._held[former]
        self._held[block] = entry
        return former

    def use(self, block: BlockId) -> None:
        """Count another request that found the block."""
        self._held[block].num_uses += 1

    @property
    def next_parked_at(self) -> int:
        """When the entry that would be evicted next was parked. InvariantError when nothing is parked."""
        return self._entries[self._policy.next()].parked_at

    def park(self, block: BlockId, at: int = 0) -> None:
        """Park a block that lost its last reference as the most recently used cache entry. `at`: a count that grows."""
        entry = self._held[block]
        if not entry.is_parked:
            entry.is_parked = True
            entry.parked_at = at
            self._num_parked += 1
            self._policy.park(entry)

    def unpark(self, block: BlockId) -> None:
        """Unpark a block that is referenced again."""
        self._unpark(self._held[block])

    def _unpark(self, entry: IndexedBlock) -> None:
        if not entry.is_parked:
            raise InvariantError(f"block {entry.block} is not parked")
        entry.is_parked = False
        self._num_parked -= 1
        self._policy.unpark(entry)

    def evict(self, keeps: Callable[[IndexedBlock], bool] | None = None) -> BlockId:
        """Forget the parked leaf that the policy chooses; returns its block. InvariantError when nothing is parked.

        `keeps` offers the entry to a cache below; it returns whether the worker still holds the name.
        """
        name = self._policy.evict()
        entry = self._entries.pop(name)
        del self._held[entry.block]
        self._num_parked -= 1
        above = None if entry.is_first else self._entries[entry.parent]
        if above is not None:
            above.num_children -= 1
            if above.is_parked and not above.num_children:
                self._policy.became_leaf(above)
        if keeps is None or not keeps(entry):
            self.events.append(Evicted(name))
        return entry.block

    def clear(self) -> list[BlockId]:
        """Forget every parked entry; returns their blocks. Entries in use stay and are announced again."""
        parked = [entry for entry in self._entries.values() if entry.is_parked]
        for entry in parked:
            del self._entries[entry.name]
            del self._held[entry.block]
        for entry in parked:
            if not entry.is_first and entry.parent in self._entries:
                self._entries[entry.parent].num_children -= 1
        self._num_parked = 0
        self._policy.clear()
        self.events.append(Cleared())
        for entry in self._entries.values():
            self.events.append(Stored(entry.name, entry.parent))
        return [entry.block for entry in parked]

    def withdraw(self, block: BlockId) -> bool:
        """Forget the name of a referenced block; False while it has children."""
        entry = self._held[block]
        if entry.is_parked:
            raise InvariantError(f"block {block} is parked: only a referenced block can lose its name")
        if entry.num_children:
            return False
        del self._entries[entry.name], self._held[block]
        if not entry.is_first:
            self._entries[entry.parent].num_children -= 1
        self.events.append(Evicted(entry.name))
        return True

    def names(self) -> Iterable[BlockHash]:
        """All indexed names, parents first."""
        return self._entries.keys()

    def snapshot(self) -> tuple[int, list[Stored]]:
        """Number of the next event, and the content that it will apply to, parents first."""
        return self.events.next_seq, [Stored(entry.name, entry.parent) for entry in self._entries.values()]

    def chains(self, max_names: int) -> list[CachedChain]:
        """The hottest content: blocks in use, then the blocks to be evicted last; O(entries).

        A chain leads from its root, or from a block listed in a hotter chain, to a leaf. At most `max_names` in all.
        """
        listed: set[BlockHash] = set()
        chains: list[CachedChain] = []
        for leaf in self._hottest_leaves():
            if len(listed) >= max_names:
                break
            at, names = leaf, [leaf.name]
            while not at.is_first and at.parent not in listed:
                at = self._entries[at.parent]
                names.append(at.name)
            names.reverse()
            del names[max_names - len(listed) :]
            listed.update(names)
            chains.append(CachedChain(after=at.parent, from_root=at.is_first, names=tuple(names)))
        return chains

    def _hottest_leaves(self) -> Iterator[IndexedBlock]:
        for entry in reversed(self._entries.values()):
            if not entry.is_parked and not entry.num_children:
                yield entry
        for name in self._policy.hottest_first():
            entry = self._entries[name]
            if not entry.num_children:
                yield entry

    def check_invariants(self) -> None:
        """Check the three facts of the module; O(entries), for tests and audits."""
        parked = {name: entry for name, entry in self._entries.items() if entry.is_parked}
        if len(self._held) != len(self._entries) or len(parked) != self._num_parked:
            raise InvariantError("names and entries differ")
        children = dict.fromkeys(self._entries, 0)
        for name, entry in self._entries.items():
            if entry.name != name or self._held.get(entry.block) is not entry:
                raise InvariantError(f"block {entry.block} is not indexed under the name that points at it")
            if entry.is_first:
                continue
            above = self._entries.get(entry.parent)
            if above is None:
                raise InvariantError(f"block {entry.block}: its parent is not indexed")
            children[entry.parent] += 1
            if above.is_parked and not entry.is_parked:
                raise InvariantError(f"block {entry.block} is referenced but its parent is not")
        if any(children[name] != entry.num_children for name, entry in self._entries.items()):
            raise InvariantError("an entry's children are miscounted")
        self._policy.check(parked)


def _first_false(holds: Callable[[int], bool], end: int) -> int:
    """First index in [0, end) where `holds` is false; `end` if nowhere. Once false, `holds` must stay false."""
    # The usual answers, none or all, cost one or two look-ups.
    if not end or not holds(0):
        return 0
    if holds(end - 1):
        return end
    low, high = 0, end - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
