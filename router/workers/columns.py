"""The workers as columns: one array per quantity and pool, which is what placement computes with.

`PoolColumns` is written cell by cell, by the record of each worker (`router/workers/record.py`); a `ClusterView` is a
read-only view of the same memory. It is valid until the registry next changes: placement reads it and keeps only what
it computed. The members of a pool are in an immutable `PoolMembers`; a new one is made when a worker joins or leaves.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.types.worker_view import WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tandem.values.ids import WorkerId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Slots = Ints | list[int]
"""[num_slots]: one number of every worker by its slot; a list where they are few, an array where they are many."""
_FEW_SLOTS = 8

RATES = ("prefill_ms", "step_ms", "link_ms")
"""Columns that are 0 where a worker has not measured them yet."""
COLUMNS = (
    "backlog",
    "active",
    "prefill_ms",
    "step_ms",
    "link_ms",
    "free_tokens",
    "relief",
    "attention",
    "penalised_until_s",
    "backlog_now",
    "active_now",
    "tokens_per_s",
)
"""The columns of numbers, in the order of `cells`; the first nine are all that prices depend on."""


class PoolMembers:
    """A pool's workers, row by row, with their fixed properties."""

    def __init__(self, infos: Sequence[WorkerInfo], slots: Sequence[int]) -> None:
        """`slots`: each worker's position in `PlacementDemand.matched`."""
        self.infos = tuple(infos)
        self.slots: Ints = np.array(slots, dtype=np.int64)
        self.pool_tokens: Ints = np.array([info.pool_tokens for info in infos], dtype=np.int64)
        self.least_pool_tokens = min((info.pool_tokens for info in infos), default=0)
        self.most_pool_tokens = max((info.pool_tokens for info in infos), default=0)
        self.kv_token_bytes: Floats = np.array([info.kv_bytes_per_token for info in infos], dtype=np.float64)
        lends = [bool(info.handoff_address) for info in infos]
        self.lends: Bools | None = None if all(lends) else np.array(lends, dtype=np.bool_)
        """Whether each row's worker has a hand-off service; None: all have."""
        self.block_sizes = _one_or_all([info.layout.block_size for info in infos])
        knows = [info.protocol_version >= ADAPTERS_SINCE for info in infos]
        self.no_adapters: Bools | None = None if all(knows) else ~np.array(knows, dtype=np.bool_)
        """Which rows' workers would ignore the adapter of an order, in an older session; None: none."""
        self.tokens: float | Floats = np.float64(1.0) * self.block_sizes
        """Block sizes in tokens, as floats for multiplications."""
        self.slot_list = list(slots)
        """`slots` as a list, which is faster for pools of few workers."""
        self.block_size_list = [info.layout.block_size for info in infos]
        """Each worker's block size, likewise."""
        numbers: dict[object, int] = {}
        # Workers that agree in this can pair with the same others.
        self.kinds: Ints = np.array(
            [numbers.setdefault((i.layout, i.transports, not i.handoff_address), len(numbers)) for i in infos],
            dtype=np.int64,
        )
        self.kind_list: list[int] = self.kinds.tolist()
        firsts = {int(kind): info for info, kind in zip(reversed(infos), reversed(self.kinds), strict=True)}
        self.examples = tuple(firsts[kind] for kind in range(len(numbers)))
        """One worker of each kind."""

    def __len__(self) -> int:
        return len(self.infos)

    @cached_property
    def rows(self) -> Mapping[WorkerKey, int]:
        """Row of each worker."""
        return {info.key: row for row, info in enumerate(self.infos)}

    def none(self) -> Bools:
        """Return flags of which none is set."""
        return np.zeros(len(self.infos), dtype=np.bool_)

    def compatible_with(self, decode: WorkerInfo) -> Bools | None:
        """Return which rows of a prefill pool can pair with a decode worker; None when all can."""
        kinds = [bool(one.handoff_address) and decode.cannot_pair(one) is None for one in self.examples]
        return None if all(kinds) else np.array(kinds, dtype=np.bool_)[self.kinds]


def _one_or_all(sizes: Sequence[int]) -> int | Ints:
    """Return one number if all are equal: dividing by a scalar costs a fifth of dividing by an array."""
    return sizes[0] if len(set(sizes)) == 1 else np.array(sizes, dtype=np.int64)


class PoolColumns:
    """The changing quantities of one pool, written by the workers' records."""

    __slots__ = (
        "active",
        "active_now",
        "attention",
        "backlog",
        "backlog_now",
        "cells",
        "free_tokens",
        "link_ms",
        "loads",
        "num_grown",
        "num_unmeasured",
        "open",
        "penalised_until_s",
        "prefill_ms",
        "relief",
        "stale",
        "step_ms",
        "tokens_per_s",
    )

    backlog: Floats
    """Uncomputed tokens that a new request queues behind."""
    active: Floats
    """Requests running, waiting or in transit."""
    prefill_ms: Floats
    """Prefill time per token."""
    step_ms: Floats
    """Time of one decode step."""
    link_ms: Floats
    """Transfer time per token whose KV arrives there."""
    free_tokens: Floats
    relief: Floats
    """Steps until a token's worth of memory is freed: every running sequence advances by one token per step."""
    attention: Floats
    """Growth of a token's work per token of context, halved; 0 where it is not reported."""
    penalised_until_s: Floats
    backlog_now: Floats
    """See `WorkerSnapshot.backlog_now`."""
    active_now: Floats
    """See `WorkerSnapshot.num_active_now`."""
    tokens_per_s: Floats
    """Prefill rate; 0 where it was not measured."""

    def __init__(self, num_workers: int) -> None:
        self.cells: Floats = np.zeros((len(COLUMNS), num_workers))
        """[len(COLUMNS), num_workers]: one piece of memory, so that few workers' columns are read all at once."""
        for name, column in zip(COLUMNS, self.cells, strict=True):
            setattr(self, name, column)
        self.open: Bools = np.ones(num_workers, dtype=np.bool_)
        self.loads: list[WorkerLoad] = [_NO_LOAD] * num_workers
        self.num_unmeasured = dict.fromkeys(RATES, num_workers)
        self.num_grown = 0
        """Rows with a nonzero `attention`."""
        self.stale = True
        """Whether earlier views are outdated as to which columns are complete, or which workers are penalised or
        closed."""

    def copy_rows(self, rows: Sequence[int], source: "PoolColumns", from_rows: Sequence[int]) -> None:
        """Copy rows of other columns to `rows` of these, which were new."""
        self.cells[:, rows] = source.cells[:, from_rows]
        self.open[rows] = source.open[from_rows]
        for row, from_row in zip(rows, from_rows, strict=True):
            self.loads[row] = source.loads[from_row]
        for name in RATES:
            self.num_unmeasured[name] = int(np.count_nonzero(getattr(self, name) == 0.0))
        self.num_grown = int(np.count_nonzero(self.attention))


_NO_LOAD = WorkerLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A read-only view of one pool."""

    members: PoolMembers
    loads: Sequence[WorkerLoad]
    cells: Floats
    """[len(COLUMNS), num_workers]: the columns of numbers."""
    backlog: Floats
    active: Floats
    prefill_ms: Floats
    step_ms: Floats
    link_ms: Floats
    free_tokens: Floats
    relief: Floats
    attention: Floats | None
    """None: no worker's work grows with context."""
    penalised_until_s: Floats | None
    """None: no worker was ever penalised."""
    backlog_now: Floats
    active_now: Floats
    tokens_per_s: Floats
    open: Bools | None
    """None: no worker is draining."""
    unmeasured: frozenset[str]
    """Names in RATES whose columns contain a 0."""

    def over(self, cells: bytes) -> "PoolView":
        """Return a view of a copy that was made of `cells` while this view was valid."""
        is_penalised, copy = self.penalised_until_s is not None, np.frombuffer(cells).reshape(self.cells.shape)
        copied = _by_name(copy, attention=self.attention is not None, penalised_until_s=is_penalised)
        return replace(self, **copied)

    def snapshot(self, row: int, now_s: float) -> WorkerSnapshot:
        """Return one worker as a value that outlives the view."""
        until_s = 0.0 if self.penalised_until_s is None else float(self.penalised_until_s[row])
        return WorkerSnapshot(
            info=self.members.infos[row],
            load=self.loads[row],
            backlog_tokens=int(self.backlog.item(row)),
            num_active=int(self.active.item(row)),
            backlog_now=int(self.backlog_now.item(row)),
            num_active_now=int(self.active_now.item(row)),
            draining=self.open is not None and not self.open[row],
            penalty_ms=max(0.0, until_s - now_s) * 1e3,
        )


def view_of(members: PoolMembers, columns: PoolColumns) -> PoolView:
    """Make a view of the columns, valid until one of them turns stale."""
    columns.stale = False
    cells = _read_only(columns.cells)
    is_penalised = bool(np.logical_or.reduce(columns.penalised_until_s))
    return PoolView(
        members=members,
        loads=columns.loads,
        open=None if np.logical_and.reduce(columns.open) else _read_only(columns.open),
        unmeasured=frozenset(name for name, count in columns.num_unmeasured.items() if count),
        **_by_name(cells, attention=bool(columns.num_grown), penalised_until_s=is_penalised),
    )


def _by_name(cells: Floats, **is_used: bool) -> dict[str, Any]:
    """Return the fields of a view that are columns; None for those that are not used."""
    found: dict[str, Any] = {"cells": cells, **dict(zip(COLUMNS, cells, strict=True))}
    return found | {name: None for name, used in is_used.items() if not used}


def _read_only(column: NDArray[Any]) -> NDArray[Any]:
    seen = column.view()
    seen.flags.writeable = False
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Both pools, and which of their workers can pair."""

    decode: PoolView
    prefill: PoolView
    partners: tuple[Bools | None, ...]
    """Prefill workers that each kind of decode worker can pair with; None: all."""
    num_slots: int

    def matched(self, tokens: Mapping[WorkerId, int]) -> Slots:
        """Convert matched tokens by worker to `PlacementDemand.matched`, leaving out workers that are not connected."""
        found = empty_slots(self.num_slots)
        for pool in (self.decode, self.prefill):
            for info, slot in zip(pool.members.infos, pool.members.slots, strict=True):
                found[slot] = tokens.get(info.key.worker_id, 0)
        return found


def empty_slots(num_slots: int) -> Slots:
    """Return 0 for each slot."""
    return [0] * num_slots if num_slots <= _FEW_SLOTS else np.zeros(num_slots, dtype=np.int64)


def partners_of(decode: PoolMembers, prefill: PoolMembers) -> tuple[Bools | None, ...]:
    return tuple(prefill.compatible_with(example) for example in decode.examples)
