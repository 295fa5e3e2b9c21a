"""Tracks which copy of each block is newer, where other nodes keep their ranks' parts of the pool. Pure; numpy.

Rank 0's node has memory for every rank's part, because KV is sent from and received into that memory; the ranks of
other nodes compute in memory of their own. So a block may be newer there (a step wrote it), newer here (it came from
another worker), or the same. Nothing is copied before it is needed: by a step there, or by a peer here.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.types.step_inputs import IntArray, StepInputs


class MirrorState:
    """The newer copy of each block of one pool. Used by one thread."""

    def __init__(self, num_blocks: int) -> None:
        self._newer_here: NDArray[np.bool_] = np.zeros(num_blocks, dtype=bool)
        self._newer_there: NDArray[np.bool_] = np.zeros(num_blocks, dtype=bool)
        self._num_newer_here = 0

    def mark_received(self, blocks: Sequence[int]) -> None:
        """Record that a peer may write these blocks here from now on; no step reads them until that is over."""
        self._newer_here[list(blocks)] = True
        self._newer_there[list(blocks)] = False
        self._num_newer_here = int(np.count_nonzero(self._newer_here))

    @property
    def num_newer_here(self) -> int:
        """Number of blocks that are newer here; while there are any, every step's blocks are checked."""
        return self._num_newer_here

    def step(self, inputs: StepInputs) -> IntArray:
        """Record a step. Returns the blocks to send to the other nodes before it; blocks that it writes become newer
        there.

        The result is sorted and has no duplicates.
        """
        placed = self._to_place(inputs)
        self._newer_here[placed] = False
        written = (inputs.slots // inputs.block_size, inputs.loads[:, 1], inputs.copies[:, 1])
        for blocks in written:
            # A block that is written but not read needs no copy: its former content is not used again.
            self._newer_there[blocks] = True
            self._newer_here[blocks] = False
        if self._num_newer_here:
            self._num_newer_here = int(np.count_nonzero(self._newer_here))
        return placed

    def stale(self, blocks: Sequence[int]) -> IntArray:
        """Blocks to fetch before a peer reads `blocks`, without duplicates; then both copies count as the same."""
        wanted: IntArray = np.unique(np.array(blocks, dtype=np.int64))
        missing: IntArray = wanted[self._newer_there[wanted]]
        self._newer_there[missing] = False
        return missing

    def _to_place(self, inputs: StepInputs) -> IntArray:
        if not self._num_newer_here:
            return np.empty(0, dtype=np.int64)
        needed = -(-inputs.lengths // inputs.block_size)
        # Excludes the zeros after a sequence's last block: zero is a block id as well.
        held = np.arange(inputs.tables.shape[1]) < needed[:, None]
        read = np.concatenate((inputs.tables[held], inputs.copies[:, 0], inputs.offloads[:, 0]))
        # Filtered before sorting: few of the blocks read are newer here, and mostly none.
        found: IntArray = np.unique(read[self._newer_here[read]])
        return found
