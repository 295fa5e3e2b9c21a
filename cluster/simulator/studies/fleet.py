"""Machines of a simulation that start, stop and change pools while requests run. Machine time counts from order to end.

The life of one: STARTING → READY → LEAVING → gone, or → TURNING → READY in the other pool. A leaving worker accepts no
more requests; what it has left after `drain_s` continues elsewhere, as after a loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from cluster.planner.values import Action, ActionKind, FleetView, Sizes, other
from cluster.simulator.model.settings import PoolSpec
from cluster.simulator.model.simulation import Simulation
from cluster.simulator.model.worker import SimWorker
from tandem.errors import InvariantError
from tandem.values.roles import WorkerRole

_LOOK_S = 0.25


class MachineState(Enum):
    """State of a machine in its life."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    TURNING = "turning"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTiming:
    start_s: float = 180.0
    """Time from an order to a worker that serves."""
    flip_s: float = 15.0
    """Time to restart a drained worker in the other role, on a machine whose page cache holds the weights."""
    drain_s: float = 30.0
    """Maximum time that a worker has to finish its work."""


@dataclass(slots=True, eq=False)
class _Machine:
    number: int
    role: WorkerRole
    """Role that it has or will have."""
    since_s: float
    state: MachineState
    worker: SimWorker | None = None


class Fleet:
    """All machines of one simulation, including those of its initial cluster."""

    def __init__(self, simulation: Simulation, timing: FleetTiming) -> None:
        self.num_flips = self.num_starts = self.num_stops = 0
        self._simulation = simulation
        self._events = simulation.events
        self._timing = timing
        self._gone_s = 0.0
        """Machine time of the machines that are gone."""
        self._machines = [
            _Machine(number, worker.info.role, 0.0, MachineState.READY, worker)
            for number, worker in enumerate(simulation.workers.all)
        ]
        self._num_first = self._num_ever = len(self._machines)

    def machine_s(self, now_s: float) -> float:
        """Return the machine time of all machines, until now."""
        return self._gone_s + sum(now_s - machine.since_s for machine in self._machines)

    def view(self) -> FleetView:
        """Return the present fleet, including what is starting."""
        coming = (MachineState.STARTING, MachineState.TURNING)
        return FleetView(
            sizes=self._count(lambda machine: machine.state is not MachineState.LEAVING),
            starting=self._count(lambda machine: machine.state in coming),
        )

    def act(self, action: Action) -> None:
        """Start an action. InvariantError if no worker can perform it."""
        if action.kind is ActionKind.START:
            self._start(action.role)
        elif action.kind is ActionKind.STOP:
            self._stop(action.role)
        else:
            self._flip(action.role)

    def _count(self, counts: Callable[[_Machine], bool]) -> Sizes:
        roles = [machine.role for machine in self._machines if counts(machine)]
        return Sizes(prefill=roles.count(WorkerRole.PREFILL), decode=roles.count(WorkerRole.DECODE))

    def _start(self, role: WorkerRole) -> None:
        self.num_starts += 1
        machine = _Machine(self._num_ever, role, self._events.now, MachineState.STARTING)
        self._num_ever += 1
        self._machines.append(machine)
        self._events.after(self._timing.start_s, partial(self._serve, machine))

    def _stop(self, role: WorkerRole) -> None:
        self.num_stops += 1
        machine = self._chosen(role, (MachineState.STARTING, MachineState.READY))
        if machine.worker is None:
            self._end(machine)
        else:
            self._leave(machine, partial(self._end, machine))

    def _flip(self, role: WorkerRole) -> None:
        self.num_flips += 1
        if not self._in(other(role), (MachineState.READY,)):
            # A machine that does not serve yet has no work to finish.
            self._chosen(other(role), (MachineState.STARTING,)).role = role
            return
        machine = self._chosen(other(role), (MachineState.READY,))
        self._leave(machine, partial(self._turn, machine))
        # From now on it counts for the pool that it joins.
        machine.role, machine.state = role, MachineState.TURNING

    def _chosen(self, role: WorkerRole, states: tuple[MachineState, ...]) -> _Machine:
        """Choose a machine that does not serve yet, else the one with the least to finish."""
        fit = self._in(role, states)
        if not fit:
            raise InvariantError(f"no {role.value} worker can be stopped")
        return min(fit, key=lambda machine: (machine.worker is not None, self._load(machine), -machine.number))

    def _in(self, role: WorkerRole, states: tuple[MachineState, ...]) -> list[_Machine]:
        return [machine for machine in self._machines if machine.role is role and machine.state in states]

    def _load(self, machine: _Machine) -> int:
        return 0 if machine.worker is None else len(self._simulation.workers.requests_on(machine.worker.info.key))

    def _serve(self, machine: _Machine) -> None:
        if machine not in self._machines:
            return
        simulation = self._simulation
        # The initial workers have their own numbers in each pool.
        index = self._num_first + machine.number
        machine.worker = simulation.start_worker(machine.role, index, self._pool(machine.role))
        machine.state = MachineState.READY

    def _pool(self, role: WorkerRole) -> PoolSpec:
        pool = self._simulation.spec.prefill if role is WorkerRole.PREFILL else self._simulation.spec.decode
        if pool is None:
            raise InvariantError(f"cannot add a worker: the cluster has no {role.value} pool")
        return pool

    def _leave(self, machine: _Machine, then: Callable[[], None]) -> None:
        machine.state, worker = MachineState.LEAVING, machine.worker
        if worker is None:
            raise InvariantError("only a serving worker can drain")
        self._simulation.registry.draining(worker.info.key, "fleet change")
        self._drain(worker, self._events.now + self._timing.drain_s, then)

    def _drain(self, worker: SimWorker, until_s: float, then: Callable[[], None]) -> None:
        if self._simulation.workers.requests_on(worker.info.key) and self._events.now < until_s:
            self._events.after(_LOOK_S, partial(self._drain, worker, until_s, then))
            return
        self._simulation.remove_worker(worker)
        then()

    def _turn(self, machine: _Machine) -> None:
        machine.worker = None
        self._events.after(self._timing.flip_s, partial(self._serve, machine))

    def _end(self, machine: _Machine) -> None:
        self._machines.remove(machine)
        self._gone_s += self._events.now - machine.since_s
