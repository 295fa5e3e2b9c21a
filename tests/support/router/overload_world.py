"""A cluster on a virtual clock under the real admission: one number of tokens per second, so many answers at once.

Every worker computes prompts first come first served at a fixed rate, and then gives tokens, one a step, to all of its
requests. Admission sees it as it sees a real one: by columns.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

from router.admission.fair_admission import FairAdmission
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionEntry, AdmissionPolicy, AdmissionRequest
from router.types.worker_view import WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.columns import ClusterView
from router.workers.record import WorkerTable
from tandem.config.admission import LimitsConfig
from tandem.errors import ServingError
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.roles import WorkerRole
from tests.support.router.worker_views import record_of, show

LAYOUT = KVLayout(
    model_fingerprint="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, tp_size=1
)


@cache
def info(name: str, *, num_blocks: int = 10_000, role: WorkerRole = WorkerRole.DECODE) -> WorkerInfo:
    return WorkerInfo(
        key=WorkerKey(WorkerId(name), Incarnation(1)),
        role=role,
        model_name="m",
        max_model_len=8192,
        num_blocks=num_blocks,
        layout=LAYOUT,
    )


def snapshot(name: str = "d0", *, backlog: int = 0, active: int = 0, rate: float = 1000.0, **load: float):
    return WorkerSnapshot(
        info=info(name),
        load=WorkerLoad(num_free_blocks=10_000, prefill_tokens_per_s=rate, num_running=active, **load),
        backlog_tokens=backlog,
        num_active=active,
    )


@dataclass(slots=True, eq=False)
class Served:
    """One request and what became of it."""

    tenant: str
    prompt: int
    answer: int
    arrived_s: float
    first_s: float | None = None
    refused_s: float | None = None
    error: ServingError | None = None

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_s is None else self.first_s - self.arrived_s


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    rate: float
    backlog: float = 0.0
    active: int = 0
    busy_until_s: float = 0.0
    queue: list[tuple[float, AdmissionEntry]] = field(default_factory=list)


class World:
    """Events in order of time."""

    def __init__(
        self,
        *,
        policy: AdmissionPolicy,
        limits: LimitsConfig | None = None,
        workers: int = 2,
        rate: float = 1000.0,
        step_s: float = 0.01,
    ) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._workers = [_Worker(f"d{i}", rate) for i in range(workers)]
        self._shown = [(0, 0)] * workers
        self._records = [record_of(snapshot(w.name, rate=rate), slot) for slot, w in enumerate(self._workers)]
        self._table = WorkerTable(self._records)
        self._step_s = step_s
        self._requests: dict[AdmissionEntry, Served] = {}
        self.max_running = policy.room.max_running_per_worker
        self.done: list[Served] = []
        self.idle_with_queue_s = 0.0
        self.admission = FairAdmission(
            view=self._view,
            num_running=int,
            limiter=RateLimiter(limits or LimitsConfig(), clock=lambda: self.now_s),
            policy=replace(policy, max_inflight=10**6),
            clock=lambda: self.now_s,
        )

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def ask(self, served: Served, *, priority: int = 0, within_s: float | None = None) -> None:
        """Schedule the arrival of a request."""

        def arrive() -> None:
            wanted = AdmissionRequest(
                tenant=served.tenant,
                priority=priority,
                num_tokens=served.prompt,
                max_output_tokens=served.answer,
                deadline_s=None if within_s is None else self.now_s + within_s,
            )
            self.done.append(served)
            try:
                entry, evicted = self.admission.enter(wanted)
            except ServingError as error:
                served.refused_s, served.error = self.now_s, error
                return
            self._requests[entry] = served
            self._tell(evicted)
            if not entry.waiting:
                self._run(entry)

        self.at(served.arrived_s, arrive)

    def run(self, until_s: float) -> None:
        self.at(0.1, self._look)
        while self._events and self._events[0][0] <= until_s:
            before_s, self.now_s = self.now_s, self._events[0][0]
            idle = any(not w.backlog and w.active < self.max_running for w in self._workers)
            if self.admission.num_waiting and idle:
                self.idle_with_queue_s += self.now_s - before_s
            heapq.heappop(self._events)[2]()

    def _view(self) -> ClusterView:
        """The columns, in which the rows of the workers that have changed since are written anew, as a router does."""
        for row, worker in enumerate(self._workers):
            if self._shown[row] != (now := (int(worker.backlog), worker.active)):
                self._shown[row] = now
                show(self._records[row], snapshot(worker.name, backlog=now[0], active=now[1], rate=worker.rate))
        return self._table.view()

    def _look(self) -> None:
        self._tell(self.admission.end_hopeless())
        self._pump()
        self.at(self.now_s + 0.1, self._look)

    def _tell(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, error in refused:
            served = self._requests.pop(entry)
            served.refused_s, served.error = self.now_s, error

    def _pump(self) -> None:
        for entry in self.admission.pump():
            self._run(entry)

    def _run(self, entry: AdmissionEntry) -> None:
        served = self._requests[entry]
        worker = min(self._workers, key=lambda w: (w.backlog / w.rate, w.active))
        worker.backlog += served.prompt
        worker.active += 1
        self.admission.placed(entry)
        worker.busy_until_s = max(self.now_s, worker.busy_until_s) + served.prompt / worker.rate
        self.at(worker.busy_until_s, lambda: self._first(worker, entry))

    def _first(self, worker: _Worker, entry: AdmissionEntry) -> None:
        served = self._requests[entry]
        worker.backlog -= served.prompt
        served.first_s = self.now_s
        self.admission.generated(entry, 1)
        self.at(self.now_s + self._step_s * served.answer, lambda: self._end(worker, entry))
        self._pump()

    def _end(self, worker: _Worker, entry: AdmissionEntry) -> None:
        served = self._requests.pop(entry)
        worker.active -= 1
        self.admission.generated(entry, served.answer - 1)
        self.admission.cached(entry, 0)
        self.admission.end(entry)
        self._pump()
