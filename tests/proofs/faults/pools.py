"""A block pool that notices every byte that was written where nobody was allowed to."""

import random
from collections.abc import Sequence

import numpy as np

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from tandem.errors import Unavailable
from tandem.values.ids import BlockId
from tandem.values.kv_layout import KVLayout


class GuardedPool:
    """Free blocks hold a pattern; one that is taken or counted with other bytes in it is a violation."""

    def __init__(self, kv: KVLayout, num_blocks: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self.violations: list[str] = []
        self.free = list(range(num_blocks))
        self._rng = random.Random(seed)
        self._memory = SharedPool(num_blocks * kv.worker_block_bytes)
        size = num_blocks * kv.region_block_bytes
        self.regions = [
            # A peer would map all of the memory.
            KVRegion.from_buffer(
                self._memory.buffer[begin : begin + size], kv, fd=self._memory.fd if kv.num_regions == 1 else None
            )
            for begin in range(0, kv.num_regions * size, size)
        ]
        shape = (kv.tp_size, kv.planes_per_rank, num_blocks, kv.layer_block_bytes)
        self._bytes = np.frombuffer(self._memory.buffer, np.uint8).reshape(shape)
        self._guard = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        self._bytes[...] = self._guard

    def take(self, count: int) -> tuple[BlockId, ...]:
        if count > len(self.free):
            raise Unavailable("pool is full", retry_after_s=0.02)
        self._rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        self._check(taken)
        return tuple(BlockId(block) for block in taken)

    def give(self, blocks: Sequence[BlockId]) -> None:
        """They are others' from now on, who write into them at once."""
        if doubled := set(blocks) & set(self.free):
            self.violations.append(f"blocks {sorted(doubled)} are freed twice")
        self._bytes[:, :, list(blocks)] = self._guard[:, :, list(blocks)]
        self.free += blocks

    def at(self, blocks: Sequence[BlockId]) -> np.ndarray:
        """Their bytes, `[rank, plane, block, byte]`."""
        return self._bytes[:, :, list(blocks)]

    def guard(self, blocks: Sequence[BlockId]) -> np.ndarray:
        """What they held when they were free."""
        return self._guard[:, :, list(blocks)]

    def put(self, blocks: Sequence[BlockId], content: np.ndarray) -> None:
        """Write into blocks that are ours."""
        self._bytes[:, :, list(blocks)] = content

    def put_plane(self, plane: int, blocks: Sequence[BlockId], content: np.ndarray) -> None:
        """Write one plane of blocks that are ours: one layer of their group."""
        self._bytes[:, plane, list(blocks)] = content

    def check_all(self, whose: str) -> None:
        """At rest: every block is free, and as it was."""
        if len(self.free) != self.num_blocks:
            self.violations.append(f"{self.num_blocks - len(self.free)} blocks of the {whose} worker leaked")
        self._check(self.free)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _check(self, blocks: Sequence[int]) -> None:
        at = list(blocks)
        if not np.array_equal(self._bytes[:, :, at], self._guard[:, :, at]):
            spoilt = [b for b in at if not np.array_equal(self._bytes[:, :, b], self._guard[:, :, b])]
            self.violations.append(f"somebody wrote into free blocks {spoilt}")
            self._bytes[:, :, spoilt] = self._guard[:, :, spoilt]
