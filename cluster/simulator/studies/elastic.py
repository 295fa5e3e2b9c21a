"""A simulation whose fleet changes: by a planner that knows the past, or by a schedule that knows the whole day."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from cluster.planner.staffing import WorkerModel
from cluster.planner.values import Action, ActionKind, Decision, Demand, FleetView, Observation, Sizes
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.finished import FinishedRequest, ttft_s
from cluster.simulator.model.report import Report, Slo, report_on
from cluster.simulator.model.settings import ClusterSpec, PoolSpec
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.fleet import Fleet, FleetTiming
from cluster.simulator.studies.worker_models import worker_with
from tandem.values.roles import WorkerRole


class FleetController(Protocol):
    """Decides how the fleet changes; called once per period."""

    def decide(self, now_s: float, seen: Observation, fleet: FleetView) -> Decision:
        """Return what to do now, and why."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Decision that changed something."""

    at_s: float
    sizes: Sizes
    """Sizes before the decision."""
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Cluster, load and timing to simulate, whatever controls the fleet."""

    trace: Trace
    slo: Slo
    spec: ClusterSpec
    timing: FleetTiming
    period_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticReport:
    """Results of a day."""

    report: Report
    machine_hours: float
    """Machine time from the first arrival to the last."""
    num_flips: int
    num_starts: int
    num_stops: int
    changes: tuple[Change, ...] = field(default=())


def run_elastic(elastic: Elastic, controller: FleetController, first: Sizes) -> ElasticReport:
    """Simulate the whole trace, starting with a fleet of these sizes that serves at once."""
    spec = sized(elastic.spec, first)
    simulation = Simulation(spec, elastic.trace, Choosing(), seed=elastic.seed)
    fleet = Fleet(simulation, elastic.timing)
    watch = _Watch(simulation, elastic)
    changes: list[Change] = []
    span_s = elastic.trace.requests[-1].arrival_s
    machine_s = [0.0]

    def look() -> None:
        simulation.events.in_background(elastic.period_s, look)
        seen, view = watch.period(), fleet.view()
        decision = controller.decide(simulation.events.now, seen, view)
        if decision.actions:
            changes.append(Change(at_s=simulation.events.now, sizes=view.sizes, decision=decision))
        for action in decision.actions:
            fleet.act(action)

    def close() -> None:
        machine_s[0] = fleet.machine_s(span_s)

    simulation.events.in_background(elastic.period_s, look)
    simulation.events.at(span_s, close)
    simulation.run()
    return ElasticReport(
        report=report_on(simulation, elastic.slo, policy="tandem", seed=elastic.seed),
        machine_hours=machine_s[0] / 3600.0,
        num_flips=fleet.num_flips,
        num_starts=fleet.num_starts,
        num_stops=fleet.num_stops,
        changes=tuple(changes),
    )


def sized(spec: ClusterSpec, sizes: Sizes) -> ClusterSpec:
    """Return the same cluster with pools of other sizes."""

    def pool(of: PoolSpec | None, num_workers: int) -> PoolSpec | None:
        return None if of is None else replace(of, num_workers=num_workers)

    return replace(spec, prefill=pool(spec.prefill, sizes.prefill), decode=pool(spec.decode, sizes.decode))


def worker_model(pool: PoolSpec) -> WorkerModel:
    """Return the model of a worker that the planner uses, as the simulation implements it."""
    engine = pool.engine
    return worker_with(
        pool.latency,
        chunk_tokens=engine.prefill_chunk_tokens,
        kv_tokens=engine.num_blocks * engine.block_size,
        max_running=engine.max_running_requests,
    )


class _Watch:
    """Observes what a router's metrics would show of a simulation: what has arrived and ended, not what will."""

    def __init__(self, simulation: Simulation, elastic: Elastic) -> None:
        self._simulation = simulation
        self._elastic = elastic
        self._arrivals = [request.arrival_s for request in elastic.trace.requests]
        self._num_arrived = self._num_ended = self._num_turned_away = 0
        self._answered: set[int] = set()
        """Requests whose first token was counted and that have not ended."""
        self._hit_rate = 0.0
        """Hit rate of recently ended requests: that of new ones is not known yet."""
        pool = elastic.spec.prefill or elastic.spec.decode
        if pool is None:
            raise ValueError("a cluster without workers cannot be observed")
        self._model = worker_model(pool)

    def period(self) -> Observation:
        """Observe the period since the last call."""
        outcomes = self._simulation.router.outcomes
        ended = [outcomes.finished[index] for index in range(self._num_ended, len(outcomes.finished))]
        self._num_ended = len(outcomes.finished)
        turned_away = outcomes.num_rejected + outcomes.num_failed
        waits_s = self._first_tokens(ended)
        num_lost, self._num_turned_away = turned_away - self._num_turned_away, turned_away
        outputs = [request.wanted.num_output_tokens for request in ended]
        lengths = [r.wanted.num_prompt_tokens + r.wanted.num_output_tokens for r in ended]
        prompts = sum(request.wanted.num_prompt_tokens for request in ended)
        cached = sum(request.cached_tokens or 0 for request in ended)
        if prompts:
            self._hit_rate += 0.2 * (cached / prompts - self._hit_rate)
        answers = Demand(
            num_answers=len(ended),
            output_tokens=sum(outputs),
            cached_tokens=cached,
            context_tokens=sum(n * length for n, length in zip(outputs, lengths, strict=True)),
            context_tokens_squared=sum(n * length**2 for n, length in zip(outputs, lengths, strict=True)),
        )
        num_decoding, taken_pools = fullness(self._simulation, self._model.kv_tokens)
        return Observation(
            period_s=self._elastic.period_s,
            demand=self._arrived().plus(answers),
            waiting_prompt_seconds=self._waiting_s(),
            num_late=sum(wait_s > self._elastic.slo.ttft_s for wait_s in waits_s) + num_lost,
            num_first=len(waits_s) + num_lost,
            num_decoding=num_decoding,
            taken_pools=taken_pools,
        )

    def _first_tokens(self, ended: Sequence[FinishedRequest]) -> list[float]:
        """Return the times to first token since the last call, of running and of ended requests."""
        waits_s = [ttft_s(request) for request in ended if request.number not in self._answered]
        self._answered.difference_update(request.number for request in ended)
        for request in self._simulation.router.live.values():
            if request.first_token_s is not None and request.number not in self._answered:
                waits_s.append(request.first_token_s - request.arrived_s)
                self._answered.add(request.number)
        return waits_s

    def _arrived(self) -> Demand:
        now = self._simulation.events.now
        first, self._num_arrived = self._num_arrived, bisect_right(self._arrivals, now)
        lengths = [r.num_prompt_tokens for r in self._elastic.trace.requests[first : self._num_arrived]]
        seconds = [self._model.prompt_seconds(int(self._hit_rate * length), length) for length in lengths]
        return Demand(
            num_requests=len(lengths),
            prompt_tokens=sum(lengths) * (1.0 - self._hit_rate),
            prompt_seconds=sum(seconds),
            prompt_seconds_squared=sum(second * second for second in seconds),
        )

    def _waiting_s(self) -> float:
        """Sum the work of prompts that wait on workers; unlike in a live cluster, the router's queue is left out."""
        tokens = sum(w.scheduler.load().num_backlog_tokens for w in self._simulation.workers.live.values())
        return tokens * self._model.prompt_token_s


def fullness(simulation: Simulation, pool_tokens: int) -> tuple[int, float]:
    """Count decode workers and the KV they use, in pools, including what queued prompts will need."""
    workers = simulation.workers.live.values()
    pools = [worker.scheduler.load() for worker in workers if worker.info.role is WorkerRole.DECODE]
    if not pools:
        return 0, 0.0
    taken = sum((pool.num_used_blocks + pool.num_promised_blocks) / pool.num_blocks for pool in pools)
    return len(pools), taken + simulation.router.admission.fair.num_waiting_tokens / pool_tokens


class Scheduled:
    """Fixed schedule: sizes of each window, known before the day; changes start early enough to take effect in time."""

    def __init__(self, windows: "tuple[Sizes, ...]", window_s: float, timing: FleetTiming) -> None:
        self._windows = windows
        self._window_s = window_s
        self._timing = timing

    def decide(self, now_s: float, seen: Observation, fleet: FleetView) -> Decision:
        """Order machines as early as they need to start, so that they serve when their window begins."""
        now = self._of(now_s)
        soon = self._of(now_s + self._timing.start_s + seen.period_s)
        turn = self._of(now_s + self._timing.flip_s + seen.period_s)
        sizes, actions = fleet.sizes, list[Action]()
        for role in WorkerRole.PREFILL, WorkerRole.DECODE:
            while sizes.size_of(role) < turn.size_of(role) and self._flips(role, sizes, turn):
                actions.append(Action(kind=ActionKind.FLIP, role=role))
                sizes = sizes.changed(role, 1).changed(_other(role), -1)
        while sizes.total < soon.total:
            role = max(WorkerRole, key=partial(_lack, sizes, soon))
            actions.append(Action(kind=ActionKind.START, role=role))
            sizes = sizes.changed(role, 1)
        while sizes.total > max(now.total, soon.total):
            role = min(WorkerRole, key=partial(_lack, sizes, now))
            actions.append(Action(kind=ActionKind.STOP, role=role))
            sizes = sizes.changed(role, -1)
        return Decision(actions=tuple(actions), wanted=now, reasons=("scheduled",))

    def _of(self, at_s: float) -> Sizes:
        return self._windows[min(int(at_s // self._window_s), len(self._windows) - 1)]

    @staticmethod
    def _flips(role: WorkerRole, sizes: Sizes, turn: Sizes) -> bool:
        donor = _other(role)
        return sizes.size_of(donor) > turn.size_of(donor)


def _lack(sizes: Sizes, wanted: Sizes, role: WorkerRole) -> int:
    return wanted.size_of(role) - sizes.size_of(role)


def _other(role: WorkerRole) -> WorkerRole:
    return WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
