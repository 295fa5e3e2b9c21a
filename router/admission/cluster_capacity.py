"""Estimates the work that the cluster can usefully accept now, and the rate at which it finishes work. Pure.

The costs are placement's: backlog tokens over measured prefill rates, and room for KV. Workers should have a little
work queued, so that none is idle, and no more, because requests cannot overtake each other in a worker's own queue.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from msgspec import Struct

from router.admission.local_prefill_capacity import LocalPrefillCapacity, local_prefill_capacity
from router.placement.costs import CostModel, filled_in
from router.workers.columns import Bools, ClusterView, Floats, PoolView

# Methods of whole columns; the ndarray methods of the same names cost twice as much on short ones.
_least, _most, _sum, _or = np.minimum.reduce, np.maximum.reduce, np.add.reduce, np.logical_or.reduce
_Rows = slice | Bools
"""A selection of a pool's workers."""
_ALL = slice(None)
MAX_MEASURED_SINGLY = 7
"""Most workers of each pool that are measured one by one; more are measured by columns. Up to here numpy adds numbers
one after the other, so both ways give equal results."""
_REMEMBERED_S = 5.0
"""Seconds over which the rate at which a queue drains is measured."""
_BELIEVED_S = 0.5
"""Weight of a rate known beforehand, in seconds of busy time, against what was measured."""


class Shortage(Enum):
    """The resource that waiting requests lack."""

    PREFILL = "prefill"
    """The workers that compute prompts have enough work queued."""
    DECODE = "decode"
    """Decode workers lack request slots, memory, or time in their steps."""
    BOTH = "both"
    """Both pools are short."""
    ROUTER = "router"
    """The router's own bound on requests in flight is reached."""

    def and_decode(self) -> "Shortage":
        """Return this shortage combined with one of the decode pool."""
        return Shortage.BOTH if self in (Shortage.PREFILL, Shortage.BOTH) else Shortage.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Limits on the work given to a worker, and the rates assumed until some are measured."""

    worker_backlog_s: float = 0.25
    max_running_per_worker: int = 256
    max_itl_s: float | None = None
    prior_prefill_tokens_per_s: float = 5_000.0
    costs: CostModel | None = None
    """Placement's cost model, by which decode workers compute short prompts themselves; None: it is unknown which, so
    all prompts wait for the prefill pool where there is one."""


class InTransit(Struct, frozen=True, kw_only=True):
    """Requests that had their turn and are not placed yet."""

    num_requests: int = 0
    work_tokens: float = 0.0
    """Prompt tokens to compute on the workers that prefill."""
    local_tokens: float = 0.0
    """Prompt tokens of requests that had their turn because a decode worker prefills them itself."""


class ClusterCapacity(Struct, frozen=True, kw_only=True):
    """Room of the cluster at one moment."""

    usable: bool
    """Whether a decode worker accepts requests; otherwise dispatch reports the reason."""
    decode_reads: bool
    """Whether there is no prefill worker, so that decode workers compute prompts."""
    slots: int
    """Further requests that decode workers may have."""
    slack_tokens: float
    """Further prompt tokens that may be queued for the prefilling pool; at or below 0 it has enough work."""
    free_tokens: float
    """KV tokens free on the emptiest decode worker; infinite when one is idle."""
    pool_tokens: float
    """Tokens of KV that the largest pool holds; infinite while there is no pool."""
    prefill_tokens_per_s: float
    """Prefill rate of the whole pool that computes prompts."""
    measured_tokens_per_s: float
    """Measured prefill rate of its fastest worker; 0 when none has been measured."""
    least_wait_s: float
    """Seconds until the first worker has finished its queued prompts."""
    awaited: bool = False
    """Whether no decode worker accepts requests but one is expected to soon."""
    local: LocalPrefillCapacity | None = None
    """Prompts that decode workers may prefill themselves while the prefill pool has enough work."""

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether waiting can make room for such a prompt; if not, dispatch reports the reason."""
        return num_tokens < self.pool_tokens

    def compute_s(self, work_tokens: float) -> float:
        """Seconds to compute one prompt on the fastest worker; 0 before any rate was measured."""
        return work_tokens / self.measured_tokens_per_s if self.measured_tokens_per_s > 0.0 else 0.0

    def takes(self, num_tokens: int) -> bool:
        """Whether a request with such a prompt would run now, on either pool."""
        if not self.usable:
            return not self.awaited
        return self.slots > 0 and self.slack_tokens > 0.0 and num_tokens < self.free_tokens

    def shortage(self, num_tokens: int) -> Shortage | None:
        """Return what a request with such a prompt would wait for; None: it would run now."""
        if not self.usable:
            return Shortage.DECODE if self.awaited else None
        prefill = None if self.slack_tokens > 0.0 else self._prefill_shortage(num_tokens)
        if self.slots > 0 and num_tokens < self.free_tokens:
            return prefill
        return Shortage.DECODE if prefill is None else prefill.and_decode()

    def local_prefill(self, num_tokens: int) -> LocalPrefillCapacity | None:
        """Return the local prefill capacity if a decode worker would compute such a prompt because the prefill pool is
        busy."""
        local = self.local
        return local if local is not None and local.reads(num_tokens) else None

    def unblocked_local_prefill(self, num_tokens: int) -> LocalPrefillCapacity | None:
        """Like `local_prefill`, but only if such a prompt lacks nothing else of the decode pool."""
        return self.local_prefill(num_tokens) if self.slots > 1 and num_tokens < self.free_tokens else None

    def least_wait_of(self, num_tokens: int) -> float:
        """Seconds until a worker could begin such a prompt, if no request waited before it."""
        local = None if self.local is None else self.unblocked_local_prefill(num_tokens)
        return self.least_wait_s if local is None else local.wait_s

    def max_overtaking_tokens(self, num_tokens: int) -> float:
        """Return the longest prompt that may overtake one of `num_tokens` that waits for the prefill pool alone.

        What it takes from the decode pool must leave enough for the waiting one; below 0: none may overtake it.
        """
        local = self.local
        if local is None or local.slack_tokens <= 0.0 or self.slots <= 1:
            return -1.0
        return min(local.most_tokens, self.free_tokens - num_tokens - 1)

    def max_fitting_tokens(self) -> float:
        """Return the longest prompt that would run now and leave a slot free; below 0: none would."""
        has_room = self.usable and self.slots > 1 and self.slack_tokens > 0.0
        return self.free_tokens - 1 if has_room else -1.0

    def _prefill_shortage(self, num_tokens: int) -> Shortage | None:
        """Return what such a prompt lacks while the prefilling pool has enough work."""
        if self.decode_reads:
            return Shortage.DECODE
        local = self.local_prefill(num_tokens)
        if local is not None and local.slack_tokens > 0.0:
            return None
        # Decode workers compute longer prompts only because the prefill pool is too small.
        return Shortage.DECODE if local is not None and num_tokens <= local.always_tokens else Shortage.PREFILL


def measure_capacity(view: ClusterView, policy: CapacityPolicy, transit: InTransit, now_s: float) -> ClusterCapacity:
    """Measure the room that is left beside `transit`."""
    most = MAX_MEASURED_SINGLY
    if len(view.decode.members.infos) <= most and len(view.prefill.members.infos) <= most:
        return _measure_singly(view, policy, transit, now_s)
    return _measure_by_columns(view, policy, transit, now_s)


def _measure_singly(view: ClusterView, policy: CapacityPolicy, transit: InTransit, now_s: float) -> ClusterCapacity:
    """Measure few workers one by one: an operation on an array costs about what ten of them do."""
    decode, prefill = view.decode, view.prefill
    # In the order of `COLUMNS`, as far as they are needed here.
    _, _, _, step_ms, _, free, _, _, penalised_until_s, backlogs, active, tokens_per_s = decode.cells.tolist()
    opened = _open_rows(decode)
    willing = opened
    if decode.penalised_until_s is not None:
        willing = [row for row in opened if penalised_until_s[row] <= now_s] or opened
    computing, rows = decode, willing
    if prefill.members.infos and (able := _lending_rows(prefill)):
        computing, rows = prefill, able
        *_, backlogs, _, tokens_per_s = prefill.cells.tolist()
    rates = measured = [tokens_per_s[row] for row in rows]
    if "prefill_ms" in computing.unmeasured:
        rates = filled_in(measured, policy.prior_prefill_tokens_per_s)
    slack, rate_of_all, least_wait_s = 0.0, 0.0, math.inf
    for row, rate in zip(rows, rates, strict=True):
        backlog = backlogs[row]
        slack += max(policy.worker_backlog_s * rate - backlog, 0.0)
        rate_of_all += rate
        least_wait_s = min(least_wait_s, backlog / rate)
    slack -= transit.work_tokens
    most_active, most_ms = policy.max_running_per_worker, math.inf
    if policy.max_itl_s is not None:
        most_ms = 1e3 * policy.max_itl_s
    slots, free_tokens = 0.0, 0.0
    with_slots: list[int] = []
    for row in willing:
        num_active = active[row]
        free_tokens = max(free_tokens, free[row]) if num_active > 0.0 else math.inf
        if num_active < most_active and (num_active <= 0.0 or step_ms[row] <= most_ms):
            slots += most_active - num_active
            with_slots.append(row)
    local = None
    if slack <= 0.0 and computing is prefill and policy.costs is not None:
        local = local_prefill_capacity(
            view,
            policy.costs,
            np.array(with_slots, dtype=np.int64),
            backlog_s=policy.worker_backlog_s,
            transit_tokens=transit.local_tokens,
            now_s=now_s,
        )
    return ClusterCapacity(
        usable=len(willing) > 0,
        decode_reads=computing is decode,
        slots=int(slots) - transit.num_requests,
        slack_tokens=slack,
        free_tokens=free_tokens,
        pool_tokens=_largest_pool(decode) if willing else math.inf,
        prefill_tokens_per_s=rate_of_all or policy.prior_prefill_tokens_per_s,
        measured_tokens_per_s=max(measured, default=0.0),
        least_wait_s=least_wait_s if rows else 0.0,
        local=local,
    )


def _open_rows(pool: PoolView) -> Sequence[int]:
    """Return the workers that accept requests."""
    if pool.open is None:
        return range(len(pool.members.infos))
    rows: list[int] = pool.open.nonzero()[0].tolist()
    return rows


def _lending_rows(prefill: PoolView) -> Sequence[int]:
    """Return the prefill workers that accept requests and can hand off what they compute."""
    rows, lends = _open_rows(prefill), prefill.members.lends
    return rows if lends is None else [row for row in rows if lends[row]]


def _measure_by_columns(view: ClusterView, policy: CapacityPolicy, transit: InTransit, now_s: float) -> ClusterCapacity:
    """Measure many workers in a few operations per pool."""
    decode, prefill = view.decode, view.prefill
    willing = _willing(decode, now_s)
    # Prefill workers that accept requests, and can hand off what they compute.
    rows: _Rows = _ALL if prefill.open is None else prefill.open
    if (lends := prefill.members.lends) is not None:
        rows = lends if prefill.open is None else lends & prefill.open
    computing, measured = prefill, prefill.tokens_per_s[rows]
    if decode_reads := not len(measured):
        computing, rows, measured = decode, willing, decode.tokens_per_s[willing]
    rates = measured
    if "prefill_ms" in computing.unmeasured:
        rates = _filled_in(measured, policy.prior_prefill_tokens_per_s)
    backlogs, active = computing.backlog_now[rows], decode.active_now[willing]
    slack = float(_sum(np.maximum(policy.worker_backlog_s * rates - backlogs, 0.0))) - transit.work_tokens
    slots: Floats = np.maximum(policy.max_running_per_worker - active, 0.0)
    if policy.max_itl_s is not None:
        slots = np.where((active > 0.0) & (decode.step_ms[willing] > 1e3 * policy.max_itl_s), 0.0, slots)
    local = None
    if slack <= 0.0 and not decode_reads and policy.costs is not None:
        local = local_prefill_capacity(
            view,
            policy.costs,
            np.arange(len(decode.members))[willing][slots > 0.0],
            backlog_s=policy.worker_backlog_s,
            transit_tokens=transit.local_tokens,
            now_s=now_s,
        )
    # Without a willing worker none is open either.
    usable, free_tokens, pool_tokens = len(active) > 0, 0.0, math.inf
    if usable:
        free_tokens = float(_most(decode.free_tokens[willing])) if _least(active) > 0.0 else math.inf
        pool_tokens = _largest_pool(decode)
    return ClusterCapacity(
        usable=usable,
        decode_reads=decode_reads,
        slots=int(_sum(slots)) - transit.num_requests,
        slack_tokens=slack,
        free_tokens=free_tokens,
        pool_tokens=pool_tokens,
        prefill_tokens_per_s=float(_sum(rates)) or policy.prior_prefill_tokens_per_s,
        measured_tokens_per_s=float(_most(measured)) if len(rates) else 0.0,
        least_wait_s=float(_least(backlogs / rates)) if len(rates) else 0.0,
        local=local,
    )


def _willing(pool: PoolView, now_s: float) -> _Rows:
    """Select the workers that accept requests, without those that have just refused or failed unless there are no
    others."""
    rows = _ALL if pool.open is None else pool.open
    if pool.penalised_until_s is None:
        return rows
    willing = pool.penalised_until_s <= now_s
    if pool.open is not None:
        willing &= pool.open
    return willing if _or(willing) else rows


def _largest_pool(pool: PoolView) -> float:
    """Return the tokens of KV that the largest of the workers that accept requests holds; there is one."""
    members = pool.members
    return float(members.most_pool_tokens if pool.open is None else _most(members.pool_tokens[pool.open]))


def _filled_in(rates: Floats, prior: float) -> Floats:
    """Fill in the mean rate for workers that have not measured theirs."""
    known = rates > 0.0
    measured = rates[known]
    # As `mean` does, which takes three times as long.
    return np.where(known, rates, _sum(measured) / len(measured) if len(measured) else prior)


class DrainMeter:
    """Measures how much is served per second while requests wait, whatever the bottleneck is."""

    def __init__(self, *, now_s: float, input_weight: float = 1.0) -> None:
        """`input_weight`: cost of one computed prompt token."""
        self._input_weight = input_weight
        self._now_s = now_s
        self._busy_s = 0.0
        self._cost = 0.0

    def passed(self, now_s: float, *, busy: bool) -> float:
        """Advance the clock, and return the seconds that have passed; `busy`: requests waited throughout.

        Measurements fade even while no request waits: otherwise, after a slow hour, every request that would have to
        wait would be refused, and nothing would ever be measured again.
        """
        passed_s, self._now_s = max(0.0, now_s - self._now_s), now_s
        if passed_s > 0.0:
            kept = math.exp(-passed_s / _REMEMBERED_S)
            self._busy_s *= kept
            self._cost *= kept
            if busy:
                self._busy_s += _REMEMBERED_S * (1.0 - kept)
        return passed_s

    def served(self, cost: float) -> None:
        """Count a waiting request that got its turn."""
        self._cost += cost

    def rate(self, prefill_tokens_per_s: float) -> float:
        """Return the cost served per second; where little was measured, that of a cluster with this prefill rate."""
        prior = prefill_tokens_per_s * self._input_weight
        return max(1e-6, (self._cost + prior * _BELIEVED_S) / (self._busy_s + _BELIEVED_S))
