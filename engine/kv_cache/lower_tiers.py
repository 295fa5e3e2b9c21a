"""Interfaces of the tiers below the pool, for KV of preempted requests and evicted cached blocks.

A tier only accounts for places in host memory; the runner moves the bytes, by `BlockOffload` and `BlockLoad`. The two
uses have separate places: a burst of preemptions never costs cached blocks, nor the other way round.
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
    """Places taken by one `store`. Compared by identity."""

    slots: tuple[int, ...]
    """One place per block, in the blocks' order."""


class OffloadTier(Protocol):
    """Places in host memory for the content of preempted requests' blocks."""

    def store(self, blocks: Sequence[BlockId]) -> OffloadHandle | None:
        """Take places for these blocks' content; None when not all fit."""
        ...

    def load(self, handle: OffloadHandle, blocks: Sequence[BlockId]) -> Sequence[int]:
        """The places of the last `len(blocks)` stored blocks; they stay taken. Raises InvariantError after `drop`."""
        ...

    def drop(self, handle: OffloadHandle) -> None:
        """Free the places. Raises InvariantError if they are free."""
        ...


class LowerCache(Protocol):
    """The pool's view of the cache below it (`engine.kv_cache.tiers.cache`)."""

    def demote(self, entry: IndexedBlock) -> bool:
        """Offer a block that the pool evicts and the next batch may overwrite. Returns whether the worker keeps it."""
        ...

    def save_now(self) -> None:
        """Save demoted blocks now: they are about to be overwritten outside any batch, perhaps by a peer."""
        ...

    def forget(self, name: BlockHash) -> None:
        """Forget a block whose content may be invalid."""
        ...

    def clear(self) -> None: ...

    def names(self) -> Iterable[BlockHash]:
        """Names of all blocks below the pool."""
        ...


class BlockCopier(Protocol):
    """Moves blocks between the pool and host memory outside steps; used by the engine's thread."""

    @property
    def traffic(self) -> Traffic:
        """Totals moved so far, including by steps."""
        ...

    def move_now(self, offloads: Sequence[BlockOffload], loads: Sequence[BlockLoad]) -> None:
        """Move blocks after the launched steps' own moves; returns when they have moved."""
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
