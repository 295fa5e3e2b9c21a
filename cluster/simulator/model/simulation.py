"""A whole cluster on a virtual clock: one router, its workers, and a trace, from the first arrival to the last end."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import cast

from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.faults import Fault, FaultKind
from cluster.simulator.model.policies import OURS, RULES, RulePlacer
from cluster.simulator.model.router import Outcomes, SimRouter
from cluster.simulator.model.settings import ClusterSpec, PoolSpec
from cluster.simulator.model.worker import SimWorker
from cluster.simulator.model.workers import SimWorkers
from router.placement.costs import CostModel
from router.placement.placer import Placer
from router.types.session_events import WorkerPort
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.errors import ConfigError, InvariantError
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.roles import WorkerRole


def worker_name(role: WorkerRole, index: int) -> WorkerId:
    """Return the id of a pool's worker, whichever process it is at the moment."""
    return WorkerId(f"{role.value}-{index:04d}")


class SimPort:
    """Replaces a session: the simulated router sends its orders another way, and can only request a snapshot."""

    def __init__(self, resync: Callable[[], None]) -> None:
        self.resync = resync

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _never() -> bool:
    """Never end a simulation early."""
    return False


def _nothing(*_args: object, **_options: object) -> None: ...


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Run without the cyclic garbage collector, which a simulation does not need: it takes an eighth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """Settings of how the router chooses workers."""

    policy: str = OURS
    model: CostModel = field(default_factory=CostModel)
    """Cost model of our own policy."""


class Simulation:
    """Simulation that is set up by its constructor and runs once."""

    def __init__(self, spec: ClusterSpec, trace: Trace, choosing: Choosing, *, seed: int) -> None:
        if choosing.policy != OURS and choosing.policy not in RULES:
            raise ConfigError(f"policy must be one of {', '.join((*RULES, OURS))}, not {choosing.policy!r}")
        self.spec = spec
        self.trace = trace
        self.events = EventQueue()
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=self.events.clock)
        self.workers = SimWorkers(self.events, self.registry, spec.network, has_decode=spec.decode is not None)
        rng = Random(seed)
        placer = self._placer(choosing, Random(rng.random()))
        policy = replace(spec.admission_policy, max_inflight=spec.max_inflight)
        if choosing.policy == OURS:
            policy = replace(policy, room=replace(policy.room, costs=choosing.model))
        self.router = SimRouter(
            self.events, placer, policy, Random(rng.random()), trace.block_tokens, self.workers.submit
        )
        self.router.on_end = self._ended
        self.workers.use(self.router)
        self._incarnation = 0
        self.num_faults = 0
        self.is_decided: Callable[[], bool] = _never
        """Called whenever a request has ended: whether the remaining ones need not be simulated."""
        self._is_cut = False
        self._given_up: set[WorkerKey] = set()
        """Workers that are gone, or will be once the router has noticed."""
        for role, pool in ((WorkerRole.PREFILL, spec.prefill), (WorkerRole.DECODE, spec.decode)):
            if pool is not None:
                for index in range(pool.num_workers):
                    self.start_worker(role, index, pool)
        if spec.decode is None:
            self._join_sink()

    def run(self) -> Outcomes:
        """Run until every request has ended, or `is_decided` returns True."""
        num_requests = len(self.trace.requests)
        self._await_arrival(0)
        outcomes = self.router.outcomes
        with _quiet_collector():
            self.events.run()
        if outcomes.num_ended < num_requests and not self._is_cut:
            raise InvariantError(f"{num_requests - outcomes.num_ended} requests wait for an event that never happens")
        return outcomes

    def start_worker(self, role: WorkerRole, index: int, pool: PoolSpec) -> SimWorker:
        """Start a process with an empty cache, and let it join."""
        self._incarnation += 1
        key = WorkerKey(worker_name(role, index), Incarnation(self._incarnation))
        info = self._info(key, role, pool.engine.num_blocks, pool.latency.kv_bytes_per_token)
        worker = SimWorker(
            info=info, config=pool.engine, latency=pool.latency, events=self.events, listener=self.workers
        )
        self.workers.live[key] = worker
        self.workers.all.append(worker)
        self._join(info, partial(self.workers.send_snapshot, worker))
        # Workers do not report all at the same time.
        phase_s = self.spec.network.load_period_s * (index % pool.num_workers + 1) / (pool.num_workers + 1)
        self.events.in_background(phase_s, partial(self.workers.report_load, worker))
        return worker

    def strike(self, fault: Fault) -> None:
        """Schedule a fault; it has no effect on a worker that is gone by then."""
        self.events.at(fault.at_s, partial(self._hit, fault))

    def _hit(self, fault: Fault) -> None:
        worker_id = worker_name(fault.role, fault.index)
        worker = next((w for key, w in self.workers.live.items() if key.worker_id == worker_id), None)
        pool = self.spec.prefill if fault.role is WorkerRole.PREFILL else self.spec.decode
        if worker is None or worker.info.key in self._given_up or pool is None:
            return
        self.num_faults += 1
        network, return_s = self.spec.network, fault.duration_s
        if fault.kind is FaultKind.FREEZE:
            worker.freeze(fault.duration_s)
            if fault.duration_s <= network.freeze_seen_s:
                return
            seen_s = network.freeze_seen_s
        else:
            worker.die()
            seen_s = network.crash_seen_s
        self._given_up.add(worker.info.key)
        self.events.after(seen_s, partial(self.remove_worker, worker))
        restart = partial(self._restart, fault.role, fault.index, pool)
        self.events.after(max(return_s, seen_s), restart)

    def _restart(self, role: WorkerRole, index: int, pool: PoolSpec) -> None:
        self.start_worker(role, index, pool)

    def remove_worker(self, worker: SimWorker) -> None:
        """Handle the router's detection of a lost process: its remaining work continues elsewhere."""
        worker.die()
        self.registry.left(worker.info.key, "gone")
        self.workers.lost(worker.info.key)

    def _join(self, info: WorkerInfo, resync: Callable[[], None]) -> None:
        self.registry.joined(info, cast(WorkerPort, SimPort(resync)))
        self.registry.prefix_changed(info.key, PrefixChange(first_sequence=0, snapshot=True, changes=()))

    def _join_sink(self) -> None:
        """Join a nominal decode worker with unlimited room, for simulations without decoding."""
        key = WorkerKey(WorkerId("sink"), Incarnation(0))
        bytes_per_token = 1 if self.spec.prefill is None else self.spec.prefill.latency.kv_bytes_per_token
        self._join(self._info(key, WorkerRole.DECODE, 2**40, bytes_per_token), _nothing)
        load = WorkerLoad(num_free_blocks=2**40, prefill_tokens_per_s=1e-3, decode_step_s=1e-9, kv_bytes_per_s=1e18)
        self.registry.load_changed(key, load)

    def _info(self, key: WorkerKey, role: WorkerRole, num_blocks: int, bytes_per_token: int) -> WorkerInfo:
        layout = KVLayout(
            model_fingerprint="simulated",
            dtype="int8",
            num_layers=1,
            num_kv_heads=1,
            head_dim=max(1, bytes_per_token // 2),
            block_size=self.trace.block_tokens,
        )
        return WorkerInfo(
            key=key,
            role=role,
            model_name="simulated",
            max_model_len=num_blocks * self.trace.block_tokens,
            num_blocks=num_blocks,
            layout=layout,
            handoff_address=key.worker_id,
        )

    def _placer(self, choosing: Choosing, rng: Random) -> Placer:
        if choosing.policy == OURS:
            return Placer(registry=self.registry, model=choosing.model, rng=rng, clock=self.events.clock)
        rule = RULES[choosing.policy](rng)
        return RulePlacer(registry=self.registry, rule=rule, rng=rng, clock=self.events.clock)

    def _ended(self) -> None:
        self._is_cut = self.is_decided()
        if self._is_cut or self.router.outcomes.num_ended >= len(self.trace.requests):
            self.events.stop()

    def _await_arrival(self, number: int) -> None:
        requests = self.trace.requests
        if number < len(requests):
            self.events.at(requests[number].arrival_s, partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        self._await_arrival(number + 1)
        self.router.arrive(number, self.trace.requests[number])
