"""Where KV goes that the pool has no room for: of preempted requests, and of cached blocks that are evicted.

A tier only keeps account of places; the bytes are moved by the runner, as `BlockOffload` and `BlockLoad` tell. The two
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
    """What one `store` took. Compared by identity."""

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
        """The pool gives a block up, and its content may be overwritten by the next batch: whether it is kept."""
        ...

    def save_now(self) -> None:
        """What was demoted is overwritten by no batch but at once, perhaps by somebody outside: save it before."""
        ...

    def forget(self, name: BlockHash) -> None:
        """The content is not to be trusted."""
        ...

    def clear(self) -> None: ...

    def names(self) -> Iterable[BlockHash]:
        """Of every block that is here."""
        ...


class BlockCopier(Protocol):
    """Moves blocks between the pool and host memory when no step does; used by the engine's thread."""

    @property
    def traffic(self) -> Traffic:
        """What was moved so far, by steps too."""
        ...

    def move_now(self, offloads: Sequence[BlockOffload], loads: Sequence[BlockLoad]) -> None:
        """Move, and return when it has happened; what launched steps do comes before."""
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
