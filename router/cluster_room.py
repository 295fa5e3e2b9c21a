"""What the cluster can usefully take at this moment, and how fast work goes away. Pure.

The costs are those of placement: backlog tokens over measured prefill rates, and room for KV. Workers are to have a
little work ahead, so that none is idle, and no more, because in their own queues nobody can be overtaken.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.worker_view import WorkerSnapshot
from tandem.roles import WorkerRole

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


def look(workers: Iterable[WorkerSnapshot], policy: RoomPolicy, transit: InTransit) -> ClusterRoom:
    """What there is room for beside `transit`."""
    live = [w for w in workers if not w.draining]
    decoders = [w for w in live if w.info.role is WorkerRole.DECODE]
    prefillers = [w for w in live if w.info.role is WorkerRole.PREFILL and w.info.handoff_address]
    # Whoever has just refused or failed is better left alone, unless there is nobody else.
    willing = [w for w in decoders if not w.penalty_ms] or decoders
    computing = prefillers or willing
    rates = _rates(computing, policy.prior_prefill_tokens_per_s)
    backlogs = [w.backlog_tokens if w.backlog_now is None else w.backlog_now for w in computing]
    slack = sum(max(0.0, policy.worker_backlog_s * r - b) for b, r in zip(backlogs, rates, strict=True))
    return ClusterRoom(
        usable=bool(decoders),
        slots=sum(_slots(w, policy) for w in willing) - transit.num_requests,
        slack_tokens=slack - transit.work_tokens,
        free_tokens=max(map(_free_tokens, willing), default=0.0),
        pool_tokens=max((w.info.pool_tokens for w in decoders), default=math.inf),
        prefill_tokens_per_s=sum(rates) or policy.prior_prefill_tokens_per_s,
        measured_tokens_per_s=max((w.load.prefill_tokens_per_s for w in computing), default=0.0),
        least_wait_s=min((b / r for b, r in zip(backlogs, rates, strict=True)), default=0.0),
    )


def _rates(workers: Sequence[WorkerSnapshot], prior: float) -> list[float]:
    measured = [w.load.prefill_tokens_per_s for w in workers if w.load.prefill_tokens_per_s > 0.0]
    mean = sum(measured) / len(measured) if measured else prior
    return [w.load.prefill_tokens_per_s or mean for w in workers]


def _slots(worker: WorkerSnapshot, policy: RoomPolicy) -> int:
    active = _num_active(worker)
    if active and policy.max_itl_s is not None and worker.load.decode_step_s > policy.max_itl_s:
        return 0
    return max(0, policy.max_running_per_worker - active)


def _free_tokens(worker: WorkerSnapshot) -> float:
    return worker.load.num_free_blocks * worker.info.layout.block_size if _num_active(worker) else math.inf


def _num_active(worker: WorkerSnapshot) -> int:
    return worker.num_active if worker.num_active_now is None else worker.num_active_now


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
