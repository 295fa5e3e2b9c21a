"""Where KV goes that the pool has no room for: a Protocol, and host memory as the nearest tier.

A tier here only keeps account of places; the bytes are moved by the runner, as `BlockOffload` and `BlockLoad` tell.
Farther tiers (disk, peers) fit the same Protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import InvariantError
from tandem.ids import BlockId


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


class HostTier:
    """A fixed number of block-sized places in host memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[OffloadHandle] = set()

    @property
    def num_free(self) -> int:
        """Places not taken."""
        return len(self._free)

    def store(self, blocks: Sequence[BlockId]) -> OffloadHandle | None:
        """See OffloadTier."""
        if not blocks or len(blocks) > len(self._free):
            return None
        handle = OffloadHandle(slots=tuple(self._free.pop() for _ in blocks))
        self._held.add(handle)
        return handle

    def load(self, handle: OffloadHandle, blocks: Sequence[BlockId]) -> Sequence[int]:
        """See OffloadTier."""
        if handle not in self._held or len(blocks) > len(handle.slots):
            raise InvariantError("these blocks are not in the tier")
        return handle.slots[len(handle.slots) - len(blocks) :]

    def drop(self, handle: OffloadHandle) -> None:
        """See OffloadTier."""
        if handle not in self._held:
            raise InvariantError("a place in the tier was freed twice")
        self._held.remove(handle)
        self._free.extend(handle.slots)
