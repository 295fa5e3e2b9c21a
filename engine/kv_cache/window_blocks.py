"""Blocks of layers that attend to a window: which exist, to which content they belong, and which may be evicted.

A model in which some layers attend to the latest `window` tokens only keeps the KV of these layers in blocks of their
own (`KVLayout.groups`). A token block of such a model is one block for the layers that attend to everything, which the
prefix index finds by name, and a *window set*: one block for each group of the other layers. A sequence holds the sets
of its window and gives the earlier ones up as it goes on. So a cached prefix is of use only where the sets of its last
window still exist: at the end of a sequence, and where sequences have parted.

All blocks are of one size and from one pool, so that neither kind can run out while the other has room.

Credit stays exact although the holders of a set change: each reference to a block of a set is paid for. The first one
owns the block; for every further one a block is promised, with which the first to leave replaces what it leaves to the
others. A sequence that has paid for `WindowSpec.most_sets` therefore never waits for a block of its windows.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv_cache.pool import KVBlockPool
from engine.types.windows import WindowSet, WindowSpec
from tandem.errors import InvariantError
from tandem.values.ids import BlockId


@dataclass(slots=True, eq=False)
class _Attached:
    blocks: WindowSet
    is_kept: bool = False
    """Whether it stays when nobody holds it any more."""


class WindowBlocks:
    """The window sets of one pool, by the block of the other layers that they belong to; O(1) each unless said."""

    __slots__ = ("_attached", "_blocks", "_idle", "_num_idle", "_owner", "_pool", "spec")

    def __init__(self, pool: KVBlockPool, spec: WindowSpec) -> None:
        self.spec = spec
        self._pool = pool
        self._blocks: set[BlockId] = set()
        self._attached: dict[BlockId, _Attached] = {}
        self._owner: dict[BlockId, BlockId] = {}
        self._idle: OrderedDict[BlockId, int] = OrderedDict()
        self._num_idle = 0

    def __contains__(self, block: BlockId) -> bool:
        """Whether this is a block of a set."""
        return block in self._blocks

    @property
    def num_idle(self) -> int:
        """Blocks of sets that nobody holds."""
        return self._num_idle

    @property
    def oldest_idle(self) -> int | None:
        """When the set that has been idle for longest became so, as given to `released`; None: no set is idle."""
        return next(iter(self._idle.values()), None)

    def set_of(self, block: BlockId) -> WindowSet | None:
        """The set that belongs to a block of the other layers; None where there is none."""
        found = self._attached.get(block)
        return None if found is None else found.blocks

    def usable(self, block_of: Callable[[int], BlockId | None], num_blocks: int, *, needed_from: int | None) -> int:
        """The longest prefix of a chain's first `num_blocks` token blocks whose last window is here.

        `block_of`: block of the other layers of a token block. `needed_from`: first token block whose set is needed
        however long the prefix is; None: that of the token that follows the prefix. O(num_blocks).
        """
        attached = self._attached
        while num_blocks:
            first = self.spec.prefix_from(num_blocks) if needed_from is None else needed_from
            gaps = (i for i in range(num_blocks - 1, first - 1, -1) if block_of(i) not in attached)
            gap = next(gaps, None)
            if gap is None:
                break
            num_blocks = gap  # a shorter prefix that still has this block in its window has the same gap
        return num_blocks

    def take(self, blocks: Iterable[BlockId]) -> None:
        """Note blocks that were just allocated for a set."""
        self._blocks.update(blocks)

    def acquire(self, owner: BlockId) -> int:
        """Add a reference to each block of an attached set. Returns how many of them others hold already."""
        found = self._attached[owner]
        # Where it was found once, the next request will look for it.
        found.is_kept = True
        return sum([self.acquire_block(block) for block in found.blocks])

    def acquire_block(self, block: BlockId) -> int:
        """Add a reference to one block of an attached set. Returns 1 if others hold it already, else 0."""
        if self._pool.acquire(block) > 1:
            return 1
        self._num_idle -= 1
        self._idle.pop(self._owner[block], None)
        return 0

    def attach(self, owner: BlockId, blocks: WindowSet) -> Sequence[BlockId]:
        """Let a referenced set belong to a block that has just got a name, or has it already.

        Returns blocks of a set that nobody holds and that it replaces, for the caller to free; a set that others hold
        stays, and the new one then belongs to nothing.
        """
        present = self._attached.get(owner)
        if present is not None:
            if present.blocks == blocks or owner not in self._idle:
                return ()
            replaced = self.detach(owner)
        else:
            replaced = ()
        self._attached[owner] = _Attached(blocks)
        self._owner.update(dict.fromkeys(blocks, owner))
        return replaced

    def keep(self, blocks: WindowSet) -> None:
        """Let a set stay when nobody holds it any more, if it belongs to a block."""
        owner = self._owner.get(blocks[0])
        if owner is not None:
            self._attached[owner].is_kept = True

    def give_up(self, blocks: WindowSet) -> None:
        """Forget a set whose one holder is about to release it, unless it is to be kept."""
        owner = self._owner.get(blocks[0])
        if owner is not None and not self._attached[owner].is_kept and self._pool.num_refs(blocks[0]) == 1:
            self.detach(owner)

    def keeps(self, block: BlockId) -> bool:
        """Whether this block of a set stays, idle, when it is released for the last time."""
        return block in self._owner

    def released(self, block: BlockId, num_refs: int, at: int) -> None:
        """Note that a reference to a block of a set was dropped, and how many are left."""
        if num_refs:
            return
        owner = self._owner.get(block)
        if owner is None:
            self._blocks.remove(block)
            return
        self._num_idle += 1
        self._idle[owner] = at

    def detach(self, owner: BlockId) -> Sequence[BlockId]:
        """Forget the set of a block. Returns its blocks if nobody holds them, for the caller to free."""
        found = self._attached.pop(owner, None)
        if found is None:
            return ()
        for block in found.blocks:
            del self._owner[block]
        if self._idle.pop(owner, None) is None:
            return ()
        self._num_idle -= len(found.blocks)
        self._blocks.difference_update(found.blocks)
        return found.blocks

    def evict(self) -> Sequence[BlockId]:
        """Forget the set that has been idle for longest. Returns its blocks, for the caller to free."""
        return self.detach(next(iter(self._idle)))

    def check_invariants(self) -> None:
        """Raise InvariantError unless sets, their owners and their idle blocks agree; O(blocks)."""
        blocks = [block for found in self._attached.values() for block in found.blocks]
        if len(set(blocks)) != len(blocks) or set(blocks) != self._owner.keys():
            raise InvariantError("a window block belongs to two blocks, or to none that has it")
        if not self._owner.keys() <= self._blocks:
            raise InvariantError("a block is a window's that is not known as one")
        idle = {owner for owner, found in self._attached.items() if not self._pool.num_refs(found.blocks[0])}
        if idle != self._idle.keys() or self._num_idle != self.spec.num_groups * len(idle):
            raise InvariantError("the idle window sets are not those without references")
        for block in self._blocks - self._owner.keys():
            if not self._pool.num_refs(block):
                raise InvariantError(f"window block {block} has neither a reference nor an owner")
