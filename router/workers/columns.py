"""The workers as columns: one array per quantity and pool, which is what placement computes with.

`PoolColumns` is written cell by cell, by the record of each worker (`router/workers/record.py`); a `ClusterView` is the
same memory, read-only. A view is valid until the registry next changes: placement reads it and keeps nothing of
it but what it computed. Who is in a pool stands in a `PoolMembers`, which never changes: when somebody joins or leaves
another is made. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.types.worker_view import WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from tandem.values.ids import WorkerId
from tandem.values.roles import WorkerRole

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

RATES = ("prefill_ms", "step_ms", "link_ms")
"""Columns that are 0 where a worker has not measured them yet."""


class PoolMembers:
    """A pool's workers, row by row, with their fixed properties."""

    def __init__(self, infos: Sequence[WorkerInfo], slots: Sequence[int]) -> None:
        """`slots`: of each worker, its place in `Demand.matched`."""
        self.infos = tuple(infos)
        self.slots: Ints = np.array(slots, dtype=np.int64)
        self.pool_tokens: Ints = np.array([info.pool_tokens for info in infos], dtype=np.int64)
        self.least_pool_tokens = min((info.pool_tokens for info in infos), default=0)
        self.kv_token_bytes: Floats = np.array([info.kv_bytes_per_token for info in infos], dtype=np.float64)
        lends = [bool(info.handoff_address) for info in infos]
        self.lends: Bools | None = None if all(lends) else np.array(lends, dtype=np.bool_)
        """Rows of workers with a hand-off service; None: all."""
        self.block_sizes = _one_or_all([info.layout.block_size for info in infos])
        self.tokens: float | Floats = np.float64(1.0) * self.block_sizes
        """Of each one's blocks: the same, ready to be multiplied with."""
        numbers: dict[object, int] = {}
        # Workers that agree in this can pair with the same others.
        self.kinds: Ints = np.array(
            [numbers.setdefault((i.layout, i.transports, not i.handoff_address), len(numbers)) for i in infos],
            dtype=np.int64,
        )
        firsts = {int(kind): info for info, kind in zip(reversed(infos), reversed(self.kinds), strict=True)}
        self.examples = tuple(firsts[kind] for kind in range(len(numbers)))
        """One worker of each kind."""

    def __len__(self) -> int:
        return len(self.infos)

    @cached_property
    def rows(self) -> Mapping[WorkerKey, int]:
        """The row of each worker."""
        return {info.key: row for row, info in enumerate(self.infos)}

    def able(self, decode: WorkerInfo) -> Bools | None:
        """Rows of a prefill pool that can pair with a decode worker; None when all can."""
        kinds = [bool(one.handoff_address) and decode.cannot_pair(one) is None for one in self.examples]
        return None if all(kinds) else np.array(kinds, dtype=np.bool_)[self.kinds]


def _one_or_all(sizes: Sequence[int]) -> int | Ints:
    """A division by one number costs a fifth of one by as many."""
    return sizes[0] if len(set(sizes)) == 1 else np.array(sizes, dtype=np.int64)


class PoolColumns:
    """The changing quantities of one pool, written by the workers' records."""

    __slots__ = (
        "active",
        "active_now",
        "attention",
        "backlog",
        "backlog_now",
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

    def __init__(self, num_workers: int) -> None:
        def zeros() -> Floats:
            return np.zeros(num_workers)

        self.backlog = zeros()
        """Uncomputed tokens that a new request queues behind."""
        self.active = zeros()
        """Requests running, waiting or on their way."""
        self.backlog_now = zeros()
        self.active_now = zeros()
        """Both as `WorkerSnapshot.backlog_now` and `num_active_now` are."""
        self.tokens_per_s = zeros()
        """Of prompts; 0 where it was not measured."""
        self.prefill_ms = zeros()
        """Per token."""
        self.step_ms = zeros()
        """Of one decode step."""
        self.link_ms = zeros()
        """Per token whose KV lands there."""
        self.free_tokens = zeros()
        self.relief = zeros()
        """Steps until a token's worth of memory comes back: every running sequence nears its end by one a step."""
        self.attention = zeros()
        """By how much of a token's work it grows per token of context, halved; 0 where nobody said."""
        self.penalised_until_s = zeros()
        self.open: Bools = np.ones(num_workers, dtype=np.bool_)
        self.loads: list[WorkerLoad] = [_NO_LOAD] * num_workers
        self.num_unmeasured = dict.fromkeys(RATES, num_workers)
        self.num_grown = 0
        """Rows with an `attention`."""
        self.stale = True
        """A view made earlier does not say any more which columns are complete, or who is penalised or closed."""


_NO_LOAD = WorkerLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A read-only view of one pool."""

    roster: PoolMembers
    loads: Sequence[WorkerLoad]
    backlog: Floats
    active: Floats
    backlog_now: Floats
    active_now: Floats
    tokens_per_s: Floats
    prefill_ms: Floats
    step_ms: Floats
    link_ms: Floats
    free_tokens: Floats
    relief: Floats
    attention: Floats | None
    """None: no worker's work grows."""
    penalised_until_s: Floats | None
    """None: no worker was ever penalised."""
    open: Bools | None
    """None: no worker drains."""
    unmeasured: frozenset[str]
    """Those of RATES in which a worker has 0."""

    def snapshot(self, row: int, now_s: float) -> WorkerSnapshot:
        """One worker, as a value that outlives the view."""
        until_s = 0.0 if self.penalised_until_s is None else float(self.penalised_until_s[row])
        return WorkerSnapshot(
            info=self.roster.infos[row],
            load=self.loads[row],
            backlog_tokens=int(self.backlog[row]),
            num_active=int(self.active[row]),
            backlog_now=int(self.backlog_now[row]),
            num_active_now=int(self.active_now[row]),
            draining=self.open is not None and not self.open[row],
            penalty_ms=max(0.0, until_s - now_s) * 1e3,
        )


def view_of(roster: PoolMembers, columns: PoolColumns) -> PoolView:
    """The columns as they are and will be until one of them turns stale."""
    columns.stale = False
    penalised = columns.penalised_until_s
    return PoolView(
        roster=roster,
        loads=columns.loads,
        backlog=_read_only(columns.backlog),
        active=_read_only(columns.active),
        backlog_now=_read_only(columns.backlog_now),
        active_now=_read_only(columns.active_now),
        tokens_per_s=_read_only(columns.tokens_per_s),
        prefill_ms=_read_only(columns.prefill_ms),
        step_ms=_read_only(columns.step_ms),
        link_ms=_read_only(columns.link_ms),
        free_tokens=_read_only(columns.free_tokens),
        relief=_read_only(columns.relief),
        attention=_read_only(columns.attention) if columns.num_grown else None,
        penalised_until_s=_read_only(penalised) if penalised.any() else None,
        open=None if columns.open.all() else _read_only(columns.open),
        unmeasured=frozenset(name for name, count in columns.num_unmeasured.items() if count),
    )


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
    """For each kind of decode worker, the rows of prefill workers that it can pair with; None: all."""
    num_slots: int

    def matched(self, tokens: Mapping[WorkerId, int]) -> Ints:
        """`Demand.matched` of leading tokens by worker; those that are not here are left out."""
        found = np.zeros(self.num_slots, dtype=np.int64)
        for pool in (self.decode, self.prefill):
            for info, slot in zip(pool.roster.infos, pool.roster.slots, strict=True):
                found[slot] = tokens.get(info.key.worker_id, 0)
        return found


def partners_of(decode: PoolMembers, prefill: PoolMembers) -> tuple[Bools | None, ...]:
    return tuple(prefill.able(example) for example in decode.examples)


def split_by_role(infos: Iterable[WorkerInfo]) -> dict[WorkerRole, list[int]]:
    """Positions of each pool's workers in `infos`."""
    found: dict[WorkerRole, list[int]] = {role: [] for role in WorkerRole}
    for position, info in enumerate(infos):
        found[info.role].append(position)
    return found
