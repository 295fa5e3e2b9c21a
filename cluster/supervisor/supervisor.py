"""Decides what the supervisor does: which process to start, restart, signal or abandon.

Pure: facts come in (ready, alive, exited, a user's Ctrl-C, time passed), actions go out; the clock is an argument. The
life of one process: PENDING → STARTING → READY → (dies) BACKOFF → STARTING …, and in the end EXITED, or ABANDONED when
it keeps dying. Workers start first and together, then the router; a stop goes in reverse, so that the router can finish
what its workers still compute.

The set of processes may change while the cluster runs: an added process becomes a member once it has served, and the
end of a retired one is no failure. Scaling, flips and rolling restarts consist of these two operations.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from cluster.supervisor.exceptions import describe_exit
from tandem.errors import InvariantError
from tandem.process.silence import SilenceWatch

LOOK_S = 1.0
"""Seconds between two checks."""


class Beats:
    """Watches the heartbeat of one process from the time it serves."""

    def __init__(self, *, silence_s: float, now: float) -> None:
        """`silence_s`: a process that is silent for this long counts as hung."""
        self._watch = SilenceWatch(silence_s=silence_s, period_s=LOOK_S, now_s=now)
        self.look_at = now + LOOK_S
        """Time of the next call of `is_silent`."""

    def on_beat(self, now: float) -> None:
        self._watch.on_message(now)

    def is_silent(self, now: float) -> bool:
        """Return whether the process has been silent too long; False before `look_at`."""
        if now < self.look_at:
            return False
        self.look_at = now + LOOK_S
        return self._watch.is_silent(now)


class Role(Enum):
    """Role of a process in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


REQUIRED_ROLES = (Role.DECODE, Role.ROUTER)
"""Roles that a cluster needs at least one of: without prefill workers, decode workers compute prompts themselves."""


class Stage(IntEnum):
    """Start order of processes; a stop goes in reverse."""

    WORKERS = 0
    ROUTER = 1


class ProcessState(Enum):
    """State of one process."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    RETIRING = "retiring"
    """Draining before it leaves the cluster; forgotten once it has ended."""
    ABANDONED = "abandoned"
    EXITED = "exited"


_LOST = (ProcessState.ABANDONED, ProcessState.RETIRING)
"""States of a process that will not serve again."""


class Phase(Enum):
    """State of the whole cluster."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Process to keep alive, with its limits."""

    name: str
    role: Role
    index: int = 0
    count: int = 1
    """Number of processes that share this one's work, such as a router's ports."""
    address: str = ""
    """Listening address of a worker, host:port."""
    drain_s: float = 30.0
    """Maximum seconds from SIGTERM to SIGKILL."""
    join_s: float = 0.0
    """Maximum seconds of its start spent waiting for other processes, on top of its own time."""
    beats: bool = False
    """Whether it sends heartbeats once it is ready."""

    @property
    def stage(self) -> Stage:
        return Stage.ROUTER if self.role is Role.ROUTER else Stage.WORKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Rules for restarting a process that died, and for giving it up: time limits in seconds, number of deaths."""

    start_timeout_s: float = 900.0
    """Time limit of a start: a large model on a slow disk takes minutes to load."""
    stop_early_s: float = 5.0
    """Maximum time to end after SIGTERM for a process without work to finish."""
    silence_s: float = 4.0
    """A process with a heartbeat that is silent for this long counts as hung."""
    stable_s: float = 30.0
    """Time of serving after which earlier deaths of a process are forgiven."""
    backoff_s: float = 0.25
    """Delay before the first restart; doubles with every rapid death."""
    max_backoff_s: float = 10.0
    max_rapid_deaths: int = 6

    def rapid_deaths(self, earlier: int, served_s: float | None) -> int:
        """Return the rapid deaths in a row of a process that has died once more, after serving for `served_s` (None:
        it did not serve)."""
        return 1 if served_s is not None and served_s >= self.stable_s else earlier + 1

    def restart_after_s(self, rapid_deaths: int) -> float | None:
        """Return the seconds to wait before a process is restarted; None: it is given up."""
        if rapid_deaths > self.max_rapid_deaths:
            return None
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** (rapid_deaths - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Action: start a process now."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Action: send a process a signal."""

    name: str
    signum: signal.Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    name: str
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Event: a process has left the set."""

    name: str
    failure: str | None = None
    """Reason why an added process never served; None for a retired one."""


Action = Launch | Send | Note | Gone


@dataclass(slots=True)
class _Process:
    plan: ProcessPlan
    state: ProcessState = ProcessState.PENDING
    was_ready: bool = False
    ready_at: float | None = None
    deadline: float | None = None
    """Deadline of the start, the backoff or the drain, depending on the state."""
    beats: Beats | None = None
    """Heartbeat watch of a process that must stay alive; None otherwise."""
    terminated: bool = False
    rapid_deaths: int = 0
    is_candidate: bool = False
    """Whether it was added and has not served yet: if it ends, it is not restarted."""
    is_outdated: bool = False
    """Whether its files changed while it was starting, so that it may have read the old ones."""

    @property
    def is_alive(self) -> bool:
        return self.state in (ProcessState.STARTING, ProcessState.READY, ProcessState.RETIRING)


@dataclass(slots=True)
class Supervisor:
    """Supervises one cluster's processes. Every method returns the actions to carry out, in order."""

    plans: Sequence[ProcessPlan]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    phase: Phase = Phase.STARTING
    failure: str | None = None
    """Reason why the cluster ended by itself; None while it runs and after a requested stop."""
    failed_name: str | None = None
    """Process whose end caused that failure."""
    _processes: dict[str, _Process] = field(init=False)

    def __post_init__(self) -> None:
        self._processes = {plan.name: _Process(plan) for plan in self.plans}
        if len(self._processes) != len(self.plans):
            raise InvariantError("two processes have the same name")

    def state(self, name: str) -> ProcessState:
        """Return the state of this process."""
        return self._processes[name].state

    def start(self, now: float) -> list[Action]:
        return self._launch_pending(now)

    def add(self, plan: ProcessPlan, now: float, *, is_needed: bool = False) -> list[Action]:
        """Add a process. If it ends before it has served it is `Gone`, unless `is_needed`: its predecessor has left."""
        if self.phase is not Phase.RUNNING:
            raise InvariantError(f"{plan.name} cannot be added to a cluster that is {self.phase.value}")
        if plan.name in self._processes:
            raise InvariantError(f"there is already a process {plan.name}")
        process = self._processes[plan.name] = _Process(plan, is_candidate=not is_needed)
        return self._launch(process, now)

    def retire(self, name: str, now: float) -> list[Action]:
        """Drain and end a process; it is `Gone` afterwards."""
        process = self._processes[name]
        if self.phase is not Phase.RUNNING:
            raise InvariantError(f"{name} cannot be retired from a cluster that is {self.phase.value}")
        if process.state is ProcessState.RETIRING:
            return []
        if not process.is_alive:
            return self._forget(process)
        wait_s = self._patience(process)
        process.beats = None
        process.state = ProcessState.RETIRING
        return self._terminate(process, wait_s, now)

    def on_ready(self, name: str, now: float) -> list[Action]:
        """Record that a process serves."""
        process = self._processes[name]
        if process.state is not ProcessState.STARTING or self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        process.state, process.ready_at, process.deadline = ProcessState.READY, now, None
        notes: list[Action] = [Note(name=name, text="is back")] if process.was_ready else []
        process.was_ready, process.is_candidate = True, False
        if process.plan.beats:
            process.beats = Beats(silence_s=self.policy.silence_s, now=now)
        if process.is_outdated:
            notes.append(Send(name=name, signum=signal.SIGHUP))
        if self.phase is Phase.STARTING:
            if all(p.state is ProcessState.READY for p in self._processes.values()):
                self.phase = Phase.RUNNING
            return notes + self._launch_pending(now)
        return notes

    def on_beat(self, name: str, now: float) -> None:
        """Record a heartbeat of a process."""
        if (beats := self._processes[name].beats) is not None:
            beats.on_beat(now)

    def on_room(self, name: str, has_room: bool, now: float) -> None:
        """Record whether there is room for a starting process: a needed one that has none may take longer."""
        process = self._processes[name]
        if process.state is not ProcessState.STARTING or process.terminated or self.phase is Phase.STOPPING:
            return
        if has_room or not process.is_candidate:
            process.deadline = self._start_deadline(process, now) if has_room else None

    def on_exited(self, name: str, status: int, now: float) -> list[Action]:
        """Record the end of a process; `status` is negative when a signal ended it, as in `subprocess`."""
        process = self._processes[name]
        process.beats = None
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            process.state, process.deadline = ProcessState.EXITED, None
            return self._advance_stop(now)
        if process.state is ProcessState.RETIRING:
            return self._forget(process)
        if process.is_candidate:
            return self._forget(process, f"{name} {describe_exit(status)} before it was ready")
        if self.phase is Phase.STARTING:
            process.state = ProcessState.EXITED
            before = "" if process.was_ready else " before it was ready"
            return self._fail(name, f"{name} {describe_exit(status)}{before}", now)
        served_s = None if process.ready_at is None else now - process.ready_at
        process.ready_at = None
        process.rapid_deaths = self.policy.rapid_deaths(process.rapid_deaths, served_s)
        wait_s = self.policy.restart_after_s(process.rapid_deaths)
        if wait_s is None:
            return self._abandon(process, status, now)
        process.state, process.deadline = ProcessState.BACKOFF, now + wait_s
        return [Note(name=name, text=f"{describe_exit(status)}; restart in {wait_s:.2g} s", is_error=True)]

    def tick(self, now: float) -> list[Action]:
        """Return the actions that have become due; call at `next_wake`, or more often."""
        actions: list[Action] = []
        for process in sorted(self._processes.values(), key=lambda process: process.plan.role is not Role.DECODE):
            name = process.plan.name
            if process.beats is not None and process.beats.is_silent(now):
                process.beats = None
                text = f"no heartbeat for {self.policy.silence_s:g} s: killed"
                actions += [Note(name=name, text=text, is_error=True), Send(name=name, signum=signal.SIGKILL)]
            if process.deadline is None or now < process.deadline:
                continue
            process.deadline = None
            if process.state is ProcessState.BACKOFF:
                process.deadline = self._first_decode_restart() if process.plan.role is Role.PREFILL else None
                if process.deadline is None:
                    actions += self._launch(process, now)
            elif process.is_alive:
                what = "did not finish its work in time" if process.terminated else "did not become ready in time"
                actions += [
                    Note(name=name, text=f"{what}: killed", is_error=True),
                    Send(name=name, signum=signal.SIGKILL),
                ]
        return actions

    def next_wake(self) -> float | None:
        """Return when `tick` next has something to do if nothing else happens."""
        processes = self._processes.values()
        due = [p.deadline for p in processes if p.deadline is not None]
        return min(due + [p.beats.look_at for p in processes if p.beats is not None], default=None)

    def is_member(self, name: str) -> bool:
        """Return whether the process is a settled member: neither new nor leaving."""
        process = self._processes[name]
        return not process.is_candidate and process.state is not ProcessState.RETIRING

    def reread(self, role: Role | None = None) -> list[Action]:
        """Have every process (of one role) reload its files: now if it serves, else once it does."""
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        processes = [p for p in self._processes.values() if role in (None, p.plan.role)]
        for process in processes:
            process.is_outdated = process.state is ProcessState.STARTING
        ready = [p.plan.name for p in processes if p.state is ProcessState.READY]
        return [Send(name=name, signum=signal.SIGHUP) for name in ready]

    def stop(self, now: float) -> list[Action]:
        """End everything in order, each process finishing its work within its limit."""
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        was_running, self.phase = self.phase is Phase.RUNNING, Phase.STOPPING
        actions: list[Action] = []
        for process in self._processes.values():
            process.beats = None
            if process.state is ProcessState.RETIRING:
                continue  # it is ending already, within its own limit
            process.deadline = None
            if not process.is_alive:
                process.state = ProcessState.EXITED
            elif not was_running:  # no request was accepted yet, so the order does not matter
                actions += self._terminate(process, self.policy.stop_early_s, now)
        return actions + self._advance_stop(now)

    def kill(self, now: float) -> list[Action]:
        """End all processes at once."""
        actions = self.stop(now)
        alive = [p for p in self._processes.values() if p.is_alive]
        for process in alive:
            process.terminated, process.deadline = True, None
        kills: list[Action] = [Send(name=p.plan.name, signum=signal.SIGKILL) for p in alive]
        return [a for a in actions if not isinstance(a, Send)] + kills

    def _first_decode_restart(self) -> float | None:
        """When the first decode worker is restarted if none is alive, else None: as nothing is served until then, the
        standby worker and the processors are for that one, and prefill workers come after it."""
        workers = [p for p in self._processes.values() if p.plan.role is Role.DECODE]
        if any(p.is_alive for p in workers):
            return None
        due = [p.deadline for p in workers if p.state is ProcessState.BACKOFF and p.deadline is not None]
        return min(due, default=None)

    def _launch_pending(self, now: float) -> list[Action]:
        """Launch the next stage, once every process before it is ready."""
        waiting = [p for p in self._processes.values() if p.state is not ProcessState.READY]
        stage = min((p.plan.stage for p in waiting), default=None)
        due = [p for p in waiting if p.plan.stage == stage and p.state is ProcessState.PENDING]
        return [action for process in due for action in self._launch(process, now)]

    def _launch(self, process: _Process, now: float) -> list[Action]:
        process.state, process.ready_at, process.is_outdated = ProcessState.STARTING, None, False
        process.deadline = self._start_deadline(process, now)
        return [Launch(name=process.plan.name)]

    def _start_deadline(self, process: _Process, now: float) -> float:
        return now + self.policy.start_timeout_s + process.plan.join_s

    def _forget(self, process: _Process, failure: str | None = None) -> list[Action]:
        del self._processes[process.plan.name]
        return [Gone(name=process.plan.name, failure=failure)]

    def _abandon(self, process: _Process, status: int, now: float) -> list[Action]:
        name, process.state = process.plan.name, ProcessState.ABANDONED
        text = f"{describe_exit(status)} {process.rapid_deaths} times in a row: abandoned"
        note = Note(name=name, text=text, is_error=True)
        role = process.plan.role
        alike = [p for p in self._processes.values() if p.plan.role is role]
        if role in REQUIRED_ROLES and all(p.state in _LOST for p in alike):
            return [note, *self._fail(name, f"no {role.value} is left: {name} {text}", now)]
        return [note]

    def _fail(self, name: str, reason: str, now: float) -> list[Action]:
        self.failure, self.failed_name = reason, name
        return self.stop(now)

    def _advance_stop(self, now: float) -> list[Action]:
        """Terminate the last stage that is still alive; the cluster has stopped when none is."""
        alive = [p for p in self._processes.values() if p.is_alive]
        if not alive:
            self.phase = Phase.STOPPED
            return []
        stage = max(p.plan.stage for p in alive)
        return [
            action
            for process in alive
            if process.plan.stage == stage and not process.terminated
            for action in self._terminate(process, self._patience(process), now)
        ]

    def _patience(self, process: _Process) -> float:
        """Return the time to end: short without work to finish, as in a failed cluster or while not serving."""
        serving = process.state is ProcessState.READY and self.failure is None
        return process.plan.drain_s if serving else min(process.plan.drain_s, self.policy.stop_early_s)

    @staticmethod
    def _terminate(process: _Process, wait_s: float, now: float) -> list[Action]:
        process.terminated, process.deadline = True, now + wait_s
        return [Send(name=process.plan.name, signum=signal.SIGTERM)]
