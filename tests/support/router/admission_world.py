"""Admission over a cluster that a test sets, one decision at a time."""

import math

from router.admission.cluster_capacity import CapacityPolicy
from router.admission.fair_admission import FairAdmission
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionPolicy, AdmissionRequest, RefusedMemory
from tandem.config.admission import LimitsConfig
from tests.support.router.overload_world import snapshot
from tests.support.router.worker_views import view_of

MAX_INFLIGHT = 10**6


class AdmissionBench:
    """Admission over a cluster that a test sets."""

    def __init__(self, *, limits: LimitsConfig | None = None, **policy: float) -> None:
        self.now_s = 100.0
        self.workers = [snapshot()]
        self.places = MAX_INFLIGHT
        self.num_refused = 0
        self.refused = RefusedMemory(least_tokens=0.0, total_tokens=math.inf)
        self.is_due = False
        room = CapacityPolicy(worker_backlog_s=0.1, max_running_per_worker=8)
        self.admission = FairAdmission(
            view=lambda: view_of(self.workers),
            num_running=lambda: MAX_INFLIGHT - self.places,
            limiter=RateLimiter(limits or LimitsConfig(), clock=lambda: self.now_s),
            policy=AdmissionPolicy(max_inflight=MAX_INFLIGHT, **{"room": room, "max_queue_s": 10.0, **policy}),
            clock=lambda: self.now_s,
            num_refused=lambda: self.num_refused,
            refused=lambda: self.refused,
            is_due=lambda: self.is_due,
        )

    def fill(self) -> None:
        """The one worker has a second of work ahead."""
        self.workers = [snapshot(backlog=1000, active=1)]

    def enter(self, tenant: str = "a", *, tokens: int = 100, priority: int = 0, within_s: float | None = None, **more):
        wanted = AdmissionRequest(
            tenant=tenant,
            priority=priority,
            num_tokens=tokens,
            max_output_tokens=more.pop("output", 1),
            deadline_s=None if within_s is None else self.now_s + within_s,
            **more,
        )
        entry, evicted = self.admission.enter(wanted)
        if not entry.waiting:
            self.admission.placed(entry)
        self.evicted = evicted
        return entry

    def turns(self) -> list:
        return self.admission.pump()


def order(bench: AdmissionBench, count: int) -> list:
    """Give turns one by one."""
    bench.workers = [snapshot(backlog=99, active=1)]
    served = []
    for _ in range(count):
        (entry,) = bench.turns()
        bench.admission.placed(entry)
        served.append(entry)
    return served
