"""Counts references to the physical KV blocks of one worker.

A block is *free* (its content has no owner), *used* (one reference per table, reservation or pin that names it)
or *idle* (no reference, but content worth finding again: the prefix index decides which, and for how long).
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tandem.errors import Code, InvariantError, Unavailable
from tandem.values.ids import BlockId


class PoolExhausted(Unavailable):
    """No KV block may be taken now, even after eviction: they are referenced or promised."""

    code = Code.RESOURCE_EXHAUSTED


class KVBlockPool:
    """Reference counts over `num_blocks` blocks; every operation is O(1)."""

    __slots__ = ("_free", "_idle", "_refs")

    def __init__(self, num_blocks: int) -> None:
        self._refs = array("i", [0]) * num_blocks
        # A stack: the block freed last is the likeliest to be in a cache, and low ids are used first.
        self._free = list(map(BlockId, range(num_blocks - 1, -1, -1)))
        self._idle: set[BlockId] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks whose content has no owner."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Unreferenced blocks that keep their content."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return len(self._refs) - len(self._free) - len(self._idle)

    def num_refs(self, block: BlockId) -> int:
        return self._refs[block]

    def allocate(self) -> BlockId:
        """Take a free block with one reference; PoolExhausted when none is free."""
        if not self._free:
            raise PoolExhausted("no free KV block")
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def acquire(self, block: BlockId) -> int:
        """Add a reference to a used or idle block. Returns its number of references."""
        if not self._refs[block]:
            self._leave_idle(block)
        self._refs[block] += 1
        return self._refs[block]

    def release(self, block: BlockId, *, keep: bool) -> int:
        """Drop a reference; the last one leaves the block idle (`keep`) or free. Returns the remaining number."""
        if self._refs[block] < 1:
            raise InvariantError(f"block {block} released without a reference")
        self._refs[block] -= 1
        if not self._refs[block]:
            if keep:
                self._idle.add(block)
            else:
                self._free.append(block)
        return self._refs[block]

    def reclaim(self, block: BlockId) -> None:
        """Make an idle block free: its content may be overwritten from now on."""
        self._leave_idle(block)
        self._free.append(block)

    def _leave_idle(self, block: BlockId) -> None:
        if block not in self._idle:
            raise InvariantError(f"block {block} is not idle")
        self._idle.remove(block)

    def check_invariants(self) -> None:
        """Check that every block has exactly one state and no negative count; O(num_blocks), for tests and audits."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is free twice")
        if free & self._idle:
            raise InvariantError(f"blocks both free and idle: {sorted(free & self._idle)}")
        for index, refs in enumerate(self._refs):
            block = BlockId(index)
            if refs < 0 or (refs == 0) != (block in free or block in self._idle):
                raise InvariantError(f"block {block} has {refs} references but is in the wrong list")


class _Held(NamedTuple):
    """Block references that end with one step."""

    touched: list[BlockId]
    """References of the step itself."""
    given_up: list[BlockId]
    """References that requests gave up after the launch, in the order of their tables."""


class StepHolds:
    """Block references that end with a step: until then the block must not be reused, locally or by a peer."""

    __slots__ = ("_launched", "_next")

    def __init__(self) -> None:
        self._launched: deque[_Held] = deque()
        self._next: list[BlockId] = []

    def __iter__(self) -> Iterator[BlockId]:
        for held in self._launched:
            yield from held.touched
            yield from held.given_up
        yield from self._next

    def hold_for_next(self, blocks: Iterable[BlockId]) -> None:
        """Keep references until the step now being planned has settled: it reads or writes these blocks."""
        self._next.extend(blocks)

    def hold(self, blocks: Iterable[BlockId]) -> bool:
        """Keep references until the newest launched step has settled; False when no step is under way."""
        if not self._launched:
            return False
        self._launched[-1].given_up.extend(blocks)
        return True

    def launch(self) -> None:
        """Record a launched step."""
        self._launched.append(_Held(self._next, []))
        self._next = []

    def settle(self) -> list[BlockId]:
        """End the oldest step. Returns the references that ended with it, to be released from the last to the first.

        The step's own references come last: where the owner of a block has given it up meanwhile, the owner's
        reference, between those of the neighbouring blocks, is then released last, in the table's order.
        """
        touched, given_up = self._launched.popleft()
        return given_up + touched
