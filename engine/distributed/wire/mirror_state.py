"""Which side has the newer content of each block, where other nodes keep their ranks' part of the pool. Pure; numpy.

Rank 0's node has memory for every rank's part, because that is what KV is sent from and received into; the ranks of
other nodes compute in memory of their own. So a block may be newer there (a step wrote it), newer here (it came from
another worker), or the same. Nothing is copied before somebody needs it: a step reads it there, a peer reads it here.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.types.step_inputs import IntArray, StepInputs


class MirrorState:
    """Which side is newer, for all blocks of one pool. Used by one thread."""

    def __init__(self, num_blocks: int) -> None:
        self._newer_here: NDArray[np.bool_] = np.zeros(num_blocks, dtype=bool)
        self._newer_there: NDArray[np.bool_] = np.zeros(num_blocks, dtype=bool)
        self._num_newer_here = 0

    def mark_received(self, blocks: Sequence[int]) -> None:
        """Note that a peer may write these blocks here from now on; no step reads them until that is over."""
        self._newer_here[list(blocks)] = True
        self._newer_there[list(blocks)] = False
        self._num_newer_here = int(np.count_nonzero(self._newer_here))

    @property
    def num_newer_here(self) -> int:
        """Blocks that no step has read yet; while there are any, each step's are looked at."""
        return self._num_newer_here

    def step(self, inputs: StepInputs) -> IntArray:
        """The blocks that must be taken there before this step; then it is computed, and what it writes is newer there.

        Sorted, each once.
        """
        placed = self._to_place(inputs)
        self._newer_here[placed] = False
        written = (inputs.slots // inputs.block_size, inputs.loads[:, 1], inputs.copies[:, 1])
        for blocks in written:
            # Whatever was there is overwritten, at least where it matters.
            self._newer_there[blocks] = True
            self._newer_here[blocks] = False
        if self._num_newer_here:
            self._num_newer_here = int(np.count_nonzero(self._newer_here))
        return placed

    def stale(self, blocks: Sequence[int]) -> IntArray:
        """Those of `blocks` to copy here before a peer reads them, each once; from then on both sides are the same."""
        wanted: IntArray = np.unique(np.array(blocks, dtype=np.int64))
        missing: IntArray = wanted[self._newer_there[wanted]]
        self._newer_there[missing] = False
        return missing

    def _to_place(self, inputs: StepInputs) -> IntArray:
        if not self._num_newer_here:
            return np.empty(0, dtype=np.int64)
        needed = -(-inputs.lengths // inputs.block_size)
        # Beyond what a sequence has its row is zero, which is a block as well.
        held = np.arange(inputs.tables.shape[1]) < needed[:, None]
        read = np.concatenate((inputs.tables[held], inputs.copies[:, 0], inputs.offloads[:, 0]))
        # Only what is found is sorted: of long sequences that is little of what is read, and mostly nothing.
        found: IntArray = np.unique(read[self._newer_here[read]])
        return found
