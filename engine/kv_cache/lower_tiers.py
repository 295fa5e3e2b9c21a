"""Interfaces of the tiers below the pool, for KV of preempted requests and evicted cached blocks.

A tier only accounts for places; the runner moves the bytes as `BlockOffload` and `BlockLoad` describe. The two
kinds have places of their own: a burst of preemptions never costs cached blocks, nor the other way round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv_cache.eviction import IndexedBlock
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.tier_counts import Traffic
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OffloadHandle:
    """The places that one `store` took. Compared by identity."""

    slots: tuple[int, ...]
    """One place per block, in the blocks' order."""


class OffloadTier(Protocol):
    """Places for the content of blocks."""

    def store(self, blocks: Sequence[BlockId]) -> OffloadHandle | None:
        """Take places for these blocks' content, or none when not all fit."""
        ...

    def load(self, handle: OffloadHandle, blocks: Sequence[BlockId]) -> Sequence[int]:
        """The places of the last `len(blocks)` blocks that were stored; they stay taken. InvariantError if dropped."""
        ...

    def drop(self, handle: OffloadHandle) -> None:
        """Free the places; InvariantError if they are free."""
        ...


class LowerCache(Protocol):
    """What the pool sees of the cache below it (`engine.kv_cache.tiers.cache`)."""

    def demote(self, entry: IndexedBlock) -> bool:
        """Offer a block that the pool evicts and the next batch may overwrite. Returns whether the tier keeps it."""
        ...

    def save_now(self) -> None:
        """Save demoted blocks now: they are about to be overwritten outside any batch, perhaps by a peer."""
        ...

    def forget(self, name: BlockHash) -> None:
        """Forget a block whose content may be invalid."""
        ...

    def clear(self) -> None: ...

    def names(self) -> Iterable[BlockHash]:
        """Names of every block in this tier."""
        ...


class BlockCopier(Protocol):
    """Moves blocks between the pool and host memory when no step does; used by the engine's thread."""

    @property
    def traffic(self) -> Traffic:
        """Totals moved so far, including by steps."""
        ...

    def move_now(self, offloads: Sequence[BlockOffload], loads: Sequence[BlockLoad]) -> None:
        """Move blocks, after whatever launched steps do, and return when they have moved."""
        ...


class HostTier:
    """A fixed number of block-sized places in host memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[OffloadHandle] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def store(self, blocks: Sequence[BlockId]) -> OffloadHandle | None:
        if not blocks or len(blocks) > len(self._free):
            return None
        handle = OffloadHandle(slots=tuple(self._free.pop() for _ in blocks))
        self._held.add(handle)
        return handle

    def load(self, handle: OffloadHandle, blocks: Sequence[BlockId]) -> Sequence[int]:
        if handle not in self._held or len(blocks) > len(handle.slots):
            raise InvariantError("these blocks are not in the tier")
        return handle.slots[len(handle.slots) - len(blocks) :]

    def drop(self, handle: OffloadHandle) -> None:
        if handle not in self._held:
            raise InvariantError("a place in the tier was freed twice")
        self._held.remove(handle)
        self._free.extend(handle.slots)
