"""Turns a scheduler's Batch into flat arrays, once per step; keeps no view of a request's arrays.

`StepInputBuilder` remembers the block tables of the previous step and copies only new blocks, so that a step's
cost grows with its rows and not with the length of their contexts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from engine.types.step_inputs import IntArray, StepInputs, no_adapters, no_moves, no_pooling, no_slots, no_tables
from engine.types.windows import WindowTable
from tandem.errors import InvariantError

_GROWTH = 1.5
"""Factor by which the remembered tables are made larger than needed."""


def build_step_inputs(batch: Batch, block_size: int) -> StepInputs:
    """Lay out one batch. Raises InvariantError when an item has fewer tokens or blocks than it computes."""
    return StepInputBuilder(block_size).build(batch)


class StepInputBuilder:
    """Lays out batches in the order of their launch."""

    def __init__(self, block_size: int, num_window_groups: int = 0, *, takes_adapters: bool = True) -> None:
        """`num_window_groups`: groups of windowed layers that have blocks of their own. `takes_adapters`: whether
        requests may have adapters.
        """
        self._takes_adapters = takes_adapters
        self._block_size = block_size
        self._tables = _TableMirror()
        self._windows = tuple(_TableMirror() for _ in range(num_window_groups))
        self._last: Batch | None = None

    def build(self, batch: Batch) -> StepInputs:
        """Lay out a batch. `tables` is a view that the next call may overwrite; all other arrays are new.

        A row may compute a token that the previous batch samples: it becomes one of `feeds`. InvariantError when an
        item has fewer tokens or blocks than it computes.
        """
        items, drafted = (batch.items, None) if not batch.num_draft_tokens else _expanded(batch.items)
        requests, starts_given, counts_given, samples, _ = zip(*items, strict=True)
        starts = np.array(starts_given, dtype=np.int64)
        counts = np.array(counts_given, dtype=np.int64)
        known = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        if drafted is not None:
            known += drafted.num_before
        awaited = _check(requests, starts, counts, known, self._block_size)
        last, self._last = self._last, batch
        order = np.lexsort((-starts if drafted is None else -drafted.longest, counts > 1))
        starts, counts = starts[order], counts[order]
        ordered = [requests[i] for i in order.tolist()]
        ends = np.cumsum(counts)
        num_single = int(np.count_nonzero(counts == 1))
        sequence, positions = _rows(starts, counts, ends, num_single)
        needed = -(-(starts + counts) // self._block_size)
        tables = self._tables.gather([request.block_table for request in ordered], needed)
        columns = positions // self._block_size
        window_tables, window_slots = self._gather_windows(ordered, needed, sequence, positions)
        last_row = np.empty(len(ordered), dtype=np.int64)
        last_row[order] = ends - 1
        scores, pooled, num_top = no_moves(), no_pooling(), 0
        if any(item.request.scoring is not None for item in batch.items):
            scores, pooled, num_top = _rows_to_score(items, (last_row + 1 - np.array(counts_given)).tolist())
        token_ids = _gather_tokens(ordered, starts, counts, num_single)
        if drafted is not None:
            token_ids[last_row[drafted.places]] = drafted.token_ids
        return StepInputs(
            token_ids=token_ids,
            feeds=_feeds(last, ordered, np.flatnonzero(awaited[order])) if awaited.any() else no_moves(),
            positions=positions,
            slots=tables[sequence, columns] * self._block_size + positions % self._block_size,
            tables=tables,
            starts=starts,
            counts=counts,
            num_single=num_single,
            sample_rows=last_row[np.array(samples, dtype=bool)],
            block_size=self._block_size,
            offloads=_pairs(batch.offloads),
            loads=_pairs(batch.loads),
            copies=_pairs(batch.copies),
            scores=scores,
            pooled=pooled,
            num_top=num_top,
            adapter_slots=_adapter_slots(ordered, sequence) if self._takes_adapters else no_adapters(),
            window_tables=window_tables,
            window_slots=window_slots,
        )

    def _gather_windows(
        self, requests: list[Request], needed: IntArray, sequence: IntArray, positions: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Tables `[num_groups, num_seqs, max_blocks]` and slots `[num_groups, num_rows]` of windowed layers."""
        size, tables, slots = self._block_size, [], []
        for group, mirror in enumerate(self._windows):
            held = [_windows(*each).groups[group] for each in zip(requests, needed.tolist(), strict=True)]
            found = mirror.gather(held, needed)
            tables.append(found)
            slots.append(found[sequence, positions // size] * size + positions % size)
        if not tables:
            return no_tables(), no_slots()
        return np.stack(tables), np.stack(slots)


class _TableMirror:
    """Block tables of the previous step as rows of an array: only new blocks are copied."""

    def __init__(self) -> None:
        self._rows: IntArray = np.zeros((0, 0), dtype=np.int64)
        # For each row: the table that it mirrors, the table's version, number of blocks copied.
        self._mirrored: list[BlockTable] = []
        self._versions: list[int] = []
        self._filled: list[int] = []

    def gather(self, tables: list[BlockTable], needed: IntArray) -> IntArray:
        """Block ids of each sequence, `[num_seqs, max_blocks]`; `needed`: number of blocks of each."""
        wanted, width = needed.tolist(), int(needed.max())
        if len(tables) > self._rows.shape[0] or width > self._rows.shape[1]:
            shape = (int(len(tables) * _GROWTH) + 1, int(width * _GROWTH) + 1)
            self._rows = np.zeros(np.maximum(shape, self._rows.shape), dtype=np.int64)
            self._mirrored, self._versions, self._filled = [], [], []
        versions = [table.version for table in tables]
        # Usually the tables are the same, and only those that crossed a block's end have a new block.
        if tables == self._mirrored and versions == self._versions:
            stale = np.flatnonzero(np.array(self._filled, dtype=np.int64) != needed).tolist()
        else:
            self._keep(tables, versions)
            stale = [i for i, (kept, now) in enumerate(zip(self._filled, wanted, strict=True)) if kept != now]
        for i in stale:
            self._fill(i, tables[i], wanted[i])
        return self._rows[: len(tables), :width]

    def _keep(self, tables: list[BlockTable], versions: list[int]) -> None:
        """Move each remembered row to its table's present position; all other rows become empty."""
        # Tables compare by identity, and none of those remembered can have died: they are held here.
        rows = {id(table): i for i, table in enumerate(self._mirrored)}
        sources, filled = [], []
        for table, version in zip(tables, versions, strict=True):
            row = rows.get(id(table), -1)
            is_kept = row >= 0 and self._versions[row] == version
            sources.append(row if is_kept else -1)
            filled.append(self._filled[row] if is_kept else 0)
        used = max(len(self._mirrored), len(tables))
        width = max([*self._filled, 0])
        moved = self._rows[sources, :width]
        moved[np.array(sources, dtype=np.int64) < 0] = 0
        self._rows[:used, :width] = 0
        self._rows[: len(tables), :width] = moved
        self._mirrored, self._versions, self._filled = list(tables), versions, filled

    def _fill(self, row: int, table: BlockTable, needed: int) -> None:
        """Update one row: its first `needed` blocks, then zeros."""
        filled = self._filled[row]
        ids = table.ids
        if needed > filled:
            self._rows[row, filled:needed] = ids[filled:needed]
        else:
            self._rows[row, needed:filled] = 0
        self._filled[row] = needed


def _windows(request: Request, num_blocks: int) -> WindowTable:
    if request.windows is None or len(request.windows) < num_blocks:
        raise InvariantError(f"request {request.request_id}: its windows have fewer than {num_blocks} blocks")
    return request.windows


class _Drafted(NamedTuple):
    """Items that verify drafts, each as several of one token."""

    places: IntArray  # [num_drafts], those that compute a draft
    token_ids: IntArray  # [num_drafts], the drafts
    num_before: IntArray  # [num_items], drafts that count as known tokens
    longest: IntArray  # [num_items], start of the last of the request's items


def _expanded(items: Sequence[BatchItem]) -> tuple[Sequence[BatchItem], _Drafted]:
    found: list[BatchItem] = []
    places: list[int] = []
    token_ids: list[int] = []
    num_before: list[int] = []
    longest: list[int] = []
    for item in items:
        count = len(item.drafts)
        found.append(item)
        if count:
            places += range(len(found), len(found) + count)
            found += [BatchItem(item.request, item.start + i, 1, True) for i in range(1, count + 1)]
            token_ids += item.drafts
        num_before += range(count + 1)
        longest += [item.start + count] * (count + 1)
    return found, _Drafted(*(np.array(part, dtype=np.int64) for part in (places, token_ids, num_before, longest)))


def _rows_to_score(items: Sequence[BatchItem], first_rows: list[int]) -> tuple[IntArray, IntArray, int]:
    """Arrays `scores` and `pooled`, in the items' order, and `num_top`; `first_rows`: each item's first row."""
    scores: list[tuple[int, int]] = []
    pooled: list[tuple[int, int, int]] = []
    num_top = num_vectors = 0
    for (request, start, num_tokens, *_), first in zip(items, first_rows, strict=True):
        if (scoring := request.scoring) is None or not (rows := scoring.rows(start, num_tokens)):
            continue
        if scoring.num_top is None:
            for place, wanted in scoring.pooled_rows(start, num_tokens):
                pooled += [(first + at - start, num_vectors, scoring.weight(place, at)) for at in wanted]
                num_vectors += 1
        elif scoring.label_token_ids:
            scores += [(first + at - start, label) for at in rows for label in scoring.label_token_ids]
        else:
            scores += [(first + position - start, request.token_ids[position + 1]) for position in rows]
            num_top = max(num_top, scoring.num_top)
    return _pairs(scores), np.array(pooled, dtype=np.int64).reshape(-1, 3), num_top


def _adapter_slots(requests: Sequence[Request], sequence: IntArray) -> IntArray:
    slots = [request.adapter_slot for request in requests]
    return no_adapters() if max(slots) < 0 else np.array(slots, dtype=np.int64)[sequence]


def _pairs(moves: Sequence[tuple[int, int]]) -> IntArray:
    return np.array(moves, dtype=np.int64).reshape(-1, 2) if moves else no_moves()


def _check(
    requests: Sequence[Request], starts: IntArray, counts: IntArray, num_tokens: IntArray, block_size: int
) -> NDArray[np.bool_]:
    """Find the requests that compute the token after their last known one, bool `[num_requests]`.

    `num_tokens`: known tokens of each, `[num_requests]`. Raises InvariantError when one has fewer tokens or blocks than
    it computes.
    """
    ends = starts + counts
    num_blocks = np.array([len(request.block_table.ids) for request in requests], dtype=np.int64)
    awaited: NDArray[np.bool_] = (starts == num_tokens) & (counts == 1)
    beyond = (ends > num_tokens) & ~awaited
    wrong = np.flatnonzero((counts < 1) | beyond | (ends > num_blocks * block_size))
    if len(wrong):
        i = int(wrong[0])
        raise InvariantError(
            f"request {requests[i].request_id}: step over tokens {starts[i]}..{ends[i]} has "
            f"{num_tokens[i]} tokens and {num_blocks[i]} blocks"
        )
    return awaited


def _feeds(last: Batch | None, requests: list[Request], rows: IntArray) -> IntArray:
    """Pairs of a row and the index of the previous batch's sample that it computes. `rows` are of single-row
    sequences.
    """
    sampling: list[Request | None] = []
    for item in () if last is None else last.items:
        if item.samples:
            # Which of several samples is the last one kept is not known yet.
            sampling += [None if item.drafts else item.request] + [None] * len(item.drafts)
    sample_of = {id(request): k for k, request in enumerate(sampling) if request is not None}
    pairs = [(row, sample_of.get(id(requests[row]))) for row in rows.tolist()]
    for row, sample in pairs:
        if sample is None:
            raise InvariantError(f"request {requests[row].request_id}: the token that it computes has not been sampled")
    return np.array(pairs, dtype=np.int64)


def _rows(starts: IntArray, counts: IntArray, ends: IntArray, num_single: int) -> tuple[IntArray, IntArray]:
    """Sequence of each row, and the row's position in it; both `[num_rows]`."""
    sequences = np.arange(len(starts), dtype=np.int64)
    if num_single == len(starts):
        return sequences, starts.copy()
    rows = np.arange(int(ends[-1]), dtype=np.int64)
    return np.repeat(sequences, counts), rows + np.repeat(starts - (ends - counts), counts)


def _gather_tokens(requests: list[Request], starts: IntArray, counts: IntArray, num_single: int) -> IntArray:
    firsts = starts.tolist()
    # Zero for a token whose id only the device knows.
    singles = [
        request.token_ids[start] if start < len(request.token_ids) else 0
        for request, start in zip(requests[:num_single], firsts[:num_single], strict=True)
    ]
    parts = [np.array(singles, dtype=np.int64)]
    for i in range(num_single, len(requests)):
        ids = requests[i].token_ids
        chunk = np.frombuffer(ids, dtype=ids.typecode, count=int(counts[i]), offset=firsts[i] * ids.itemsize)
        parts.append(chunk.astype(np.int64))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
