"""What the cluster can usefully take at this moment, and how fast work goes away. Pure.

The costs are those of placement: backlog tokens over measured prefill rates, and room for KV. Workers are to have a
little work ahead, so that none is idle, and no more, because in their own queues nobody can be overtaken.
"""

import math
from dataclasses import dataclass

import numpy as np

from router.pools import Bools, ClusterView, Floats, PoolView

_REMEMBERED_S = 5.0
"""Of busy time, over which the rate at which a queue drains is measured."""
_BELIEVED_S = 0.5
"""Of busy time, that a rate known beforehand counts for beside what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPolicy:
    """How much of a worker is used, and what stands for rates that nobody has measured."""

    worker_backlog_s: float = 0.25
    max_running_per_worker: int = 256
    max_itl_s: float | None = None
    prior_prefill_tokens_per_s: float = 5_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InTransit:
    """Requests that had their turn and are not in the workers' books yet."""

    num_requests: int = 0
    work_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoom:
    """The cluster at one moment."""

    usable: bool
    """A decode worker takes requests; without one dispatch says what is wrong."""
    slots: int
    """Requests that decode workers may have besides."""
    slack_tokens: float
    """Prompt tokens that the pool may have ahead besides; at or below 0 it has enough to do."""
    free_tokens: float
    """KV that the emptiest decode worker has room for; infinite when one has nothing to do."""
    pool_tokens: float
    """KV that the largest pool holds; infinite while there is none."""
    prefill_tokens_per_s: float
    """Of the whole pool that computes prompts."""
    measured_tokens_per_s: float
    """Of its fastest worker; 0 when none has measured."""
    least_wait_s: float
    """Until the worker that is first done with its prompts is done."""

    def ever_holds(self, num_tokens: int) -> bool:
        """Whether waiting can make room for such a prompt; if not, dispatch says what is wrong."""
        return num_tokens < self.pool_tokens

    def takes(self, num_tokens: int) -> bool:
        """Whether a request with such a prompt would be run now."""
        return not self.usable or (self.slots > 0 and self.slack_tokens > 0.0 and num_tokens < self.free_tokens)


def look(view: ClusterView, policy: RoomPolicy, transit: InTransit, now_s: float) -> ClusterRoom:
    """What there is room for beside `transit`. A few operations on each pool, however many workers it has."""
    decode = view.decode
    open_rows = _open(decode)
    willing = _willing(decode, open_rows, now_s)
    lending = view.prefill.roster.lends if view.prefill.open is None else view.prefill.roster.lends & view.prefill.open
    computing, rows = (view.prefill, lending) if lending.any() else (decode, willing)
    rates = _rates(computing.tokens_per_s[rows], policy.prior_prefill_tokens_per_s)
    backlogs, active = computing.backlog_now[rows], decode.active_now[willing]
    slack = np.maximum(policy.worker_backlog_s * rates - backlogs, 0.0).sum()
    return ClusterRoom(
        usable=bool(open_rows.any()),
        slots=int(_slots(active, decode.step_ms[willing], policy).sum()) - transit.num_requests,
        slack_tokens=float(slack) - transit.work_tokens,
        free_tokens=_free_tokens(active, decode.free_tokens[willing]),
        pool_tokens=float(decode.roster.pool_tokens[open_rows].max()) if bool(open_rows.any()) else math.inf,
        prefill_tokens_per_s=float(rates.sum()) or policy.prior_prefill_tokens_per_s,
        measured_tokens_per_s=float(computing.tokens_per_s[rows].max(initial=0.0)),
        least_wait_s=float((backlogs / rates).min()) if len(rates) else 0.0,
    )


def _open(pool: PoolView) -> Bools:
    return np.ones(len(pool.roster), dtype=np.bool_) if pool.open is None else pool.open


def _willing(pool: PoolView, open_rows: Bools, now_s: float) -> Bools:
    """Whoever has just refused or failed is better left alone, unless there is nobody else."""
    if pool.penalised_until_s is None:
        return open_rows
    willing = open_rows & (pool.penalised_until_s <= now_s)
    return willing if willing.any() else open_rows


def _rates(rates: Floats, prior: float) -> Floats:
    """Who has not measured is taken for the mean of those that have."""
    known = rates > 0.0
    if known.all():
        return rates
    return np.where(known, rates, rates[known].mean() if known.any() else prior)


def _slots(active: Floats, step_ms: Floats, policy: RoomPolicy) -> Floats:
    free: Floats = np.maximum(policy.max_running_per_worker - active, 0.0)
    if policy.max_itl_s is None:
        return free
    return np.where((active > 0.0) & (step_ms > 1e3 * policy.max_itl_s), 0.0, free)


def _free_tokens(active: Floats, free_tokens: Floats) -> float:
    if not len(active):
        return 0.0
    return float(free_tokens.max()) if active.all() else math.inf


class DrainMeter:
    """How much is served per second while somebody waits: whatever holds the cluster back, this shows it."""

    def __init__(self, *, now_s: float) -> None:
        self._now_s = now_s
        self._busy_s = 0.0
        self._cost = 0.0

    def passed(self, now_s: float, *, busy: bool) -> None:
        """Time went by; `busy`: somebody waited all the while."""
        if busy and now_s > self._now_s:
            kept = math.exp((self._now_s - now_s) / _REMEMBERED_S)
            self._busy_s = self._busy_s * kept + _REMEMBERED_S * (1.0 - kept)
            self._cost *= kept
        self._now_s = now_s

    def served(self, cost: float) -> None:
        """Somebody who had waited got a turn."""
        self._cost += cost

    def rate(self, prior: float) -> float:
        """Cost per second; `prior`: what is expected where little was measured."""
        return max(1e-6, (self._cost + prior * _BELIEVED_S) / (self._busy_s + _BELIEVED_S))
