"""From a scheduler's Batch to flat arrays: one row per token to compute, built once per step.

Rows are ordered for the attention backends: first the sequences with a single row (decoding, mostly), longest
first, then those with several (prefill chunks). Numpy only; nothing here keeps a view of a request's arrays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import Batch, BatchItem
from tandem.errors import InvariantError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What one step computes. `num_seqs` sequences in row order; `num_rows` tokens."""

    token_ids: IntArray  # [num_rows]
    positions: IntArray  # [num_rows]
    slots: IntArray  # [num_rows], block * block_size + offset
    tables: IntArray  # [num_seqs, max_blocks], block ids, zero where a sequence has fewer
    starts: IntArray  # [num_seqs], first position computed
    counts: IntArray  # [num_seqs], rows of the sequence
    num_single: int
    """Sequences with one row; they are the first, and their lengths never increase."""
    sample_rows: IntArray  # last row of each sampling item, in the batch's order
    block_size: int

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence once the step is done, `[num_seqs]`."""
        return self.starts + self.counts


def build_step_inputs(batch: Batch, block_size: int) -> StepInputs:
    """Lay out a batch; InvariantError when an item has fewer tokens or blocks than it computes."""
    items = batch.items
    order = sorted(range(len(items)), key=lambda i: (items[i].num_tokens > 1, -items[i].start))
    ordered = [items[i] for i in order]
    starts = np.array([item.start for item in ordered], dtype=np.int64)
    counts = np.array([item.num_tokens for item in ordered], dtype=np.int64)
    ends = np.cumsum(counts)
    num_blocks = -(-(starts + counts) // block_size)
    token_ids, tables = _gather(ordered, ends, num_blocks.tolist())
    rows = np.arange(int(ends[-1]), dtype=np.int64)
    positions = rows + np.repeat(starts - (ends - counts), counts)
    sequence = np.repeat(np.arange(len(items), dtype=np.int64), counts)
    blocks = tables[sequence, positions // block_size]
    last_row = np.empty(len(items), dtype=np.int64)
    last_row[order] = ends - 1
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        tables=tables,
        starts=starts,
        counts=counts,
        num_single=int((counts == 1).sum()),
        sample_rows=last_row[[item.samples for item in items]],
        block_size=block_size,
    )


def _gather(ordered: list[BatchItem], ends: IntArray, num_blocks: list[int]) -> tuple[IntArray, IntArray]:
    token_ids = np.empty(int(ends[-1]), dtype=np.int64)
    tables = np.zeros((len(ordered), max(num_blocks)), dtype=np.int64)
    row = 0
    for i, (item, needed) in enumerate(zip(ordered, num_blocks, strict=True)):
        request = item.request
        end = item.start + item.num_tokens
        ids = request.block_table.ids
        if item.num_tokens < 1 or end > len(request.token_ids) or len(ids) < needed:
            raise InvariantError(
                f"request {request.request_id}: step over tokens {item.start}..{end} has "
                f"{len(request.token_ids)} tokens and {len(ids)} of {needed} blocks"
            )
        tables[i, :needed] = np.frombuffer(ids, dtype=ids.typecode, count=needed)
        if item.num_tokens == 1:
            token_ids[row] = request.token_ids[item.start]
        else:
            tokens = np.frombuffer(request.token_ids, dtype=request.token_ids.typecode)
            token_ids[row : row + item.num_tokens] = tokens[item.start : end]
        row += item.num_tokens
    return token_ids, tables
