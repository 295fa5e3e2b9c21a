"""Inputs of one step as flat arrays: one row per token. Numpy only.

Rows are ordered for the attention backends: first the sequences with a single row (decoding, mostly), longest
first, then those with several (prefill chunks). A request whose drafts are verified is several sequences here, each of
one row, with the same block table and one token more: a layer's keys are all in the cache before any row attends. So
backends and recorded steps compute drafts as they compute decodes, in the same kernels and with the same results. The
rows of such a request follow each other in the order of their positions.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def no_moves() -> IntArray:
    """An empty array of pairs, `[0, 2]`."""
    return np.empty((0, 2), dtype=np.int64)


def no_tables() -> IntArray:
    """Tables of no group, `[0, 0, 0]`."""
    return np.empty((0, 0, 0), dtype=np.int64)


def no_slots() -> IntArray:
    """Slots of no group, `[0, 0]`."""
    return np.empty((0, 0), dtype=np.int64)


def no_adapters() -> IntArray:
    """Slots of no row, `[0]`."""
    return np.empty(0, dtype=np.int64)


def no_pooling() -> IntArray:
    """An empty array of rows to pool, `[0, 3]`."""
    return np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one step: `num_seqs` sequences in row order; `num_rows` tokens.

    Blocks move first, in the order offloads, loads, copies.
    """

    token_ids: IntArray  # [num_rows]
    positions: IntArray  # [num_rows]
    slots: IntArray  # [num_rows], block * block_size + offset
    tables: IntArray  # [num_seqs, max_blocks], block ids, zero where a sequence has fewer
    starts: IntArray  # [num_seqs], first position computed
    counts: IntArray  # [num_seqs], rows of the sequence
    num_single: int
    """Sequences with one row; they come first, longest first."""
    sample_rows: (
        IntArray  # row of each sample, in the batch's order: an item's last row, or with drafts all of its rows
    )
    block_size: int
    offloads: IntArray = field(default_factory=no_moves)  # [num_offloads, 2], block and place in the host tier
    loads: IntArray = field(default_factory=no_moves)  # [num_loads, 2], place and block
    copies: IntArray = field(default_factory=no_moves)  # [num_copies, 2], blocks (source, target)
    feeds: IntArray = field(default_factory=no_moves)  # [num_feeds, 2], row whose token id only the device knows,
    # and which sample of the step before it is
    scores: IntArray = field(default_factory=no_moves)  # [num_scores, 2], row to read, token that follows it
    pooled: IntArray = field(default_factory=no_pooling)  # [num_pooled, 3], row to read, index of its vector,
    # factor in the vector's sum; 0: the vector is the rows' maximum
    num_top: int = 0
    """Most likely tokens to report for each scored row."""
    adapter_slots: IntArray = field(default_factory=no_adapters)  # [num_rows], slot of each row's adapter, -1 for
    # none; [0] where no row has one
    window_tables: IntArray = field(default_factory=no_tables)  # [num_window_groups, num_seqs, max_blocks], as
    # `tables`, for layers that are kept apart; entries before a sequence's window name no block of it
    window_slots: IntArray = field(default_factory=no_slots)  # [num_window_groups, num_rows], as `slots`

    def of_group(self, group: int) -> "StepInputs":
        """The step as it is for the layers of one group (`tandem.values.kv_layout.KVLayout.groups`)."""
        if not group:
            return self
        return replace(self, tables=self.window_tables[group - 1], slots=self.window_slots[group - 1])

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence once the step is done, `[num_seqs]`."""
        return self.starts + self.counts
