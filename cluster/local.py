"""A whole cluster on this machine: real processes, started, supervised and stopped.

`async with LocalCluster(config) as cluster:` enters when every process serves and leaves when all have drained. It
only carries facts to `cluster.supervisor` and carries out what that decides.
"""

import asyncio
import os
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from cluster.child import Callbacks, Child
from cluster.effective import (
    child_environment,
    make_effective,
    module_command,
    plan_processes,
    plan_routers,
    with_router_ports,
    written,
)
from cluster.supervisor import Action, Launch, Note, Phase, Policy, ProcessPlan, ProcessState, Role, Send, Supervisor
from tandem.config import ClusterConfig
from tandem.hosts import join
from tandem.load_progress import LoadReport

LOG_TAIL_LINES = 20
EXIT_NOT_STARTED = 127
Command = Callable[[ProcessPlan, Path, int], Sequence[str]]
"""The command line of a process: its plan, the configuration's path, the descriptor for its ready line."""


class ClusterFailed(Exception):
    """The cluster did not start, or could not be kept alive; the message holds the guilty process's last words."""


class StoppedEarly(Exception):
    """A stop was asked for before the cluster was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """What is known of one process now."""

    name: str
    role: Role
    state: ProcessState
    pid: int | None
    address: str
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Its last ready line: worker_id, num_blocks, block_size, kv_bytes, weights_bytes, model, load_s, …"""

    @property
    def worker_id(self) -> str:
        """The id that the worker gave itself; its name before it did."""
        return str(self.ready.get("worker_id", self.name))


class Watcher(Protocol):
    """Whoever shows the user what happens. Called on the event loop; must not raise."""

    def on_state(self, view: ProcessView) -> None:
        """A process has moved on."""

    def on_loading(self, name: str, report: LoadReport) -> None:
        """A process says how its weights load."""

    def on_note(self, note: Note) -> None:
        """The supervisor has something to say."""

    def on_log(self, name: str, line: str) -> None:
        """A process wrote a line to stdout or stderr."""


class SilentWatcher:
    """Shows nothing."""

    def on_state(self, view: ProcessView) -> None:
        """Ignored."""

    def on_loading(self, name: str, report: LoadReport) -> None:
        """Ignored."""

    def on_note(self, note: Note) -> None:
        """Ignored."""

    def on_log(self, name: str, line: str) -> None:
        """Ignored."""


class LocalCluster:
    """The processes of one configuration. Enter and leave it on the thread that lives longest (see Child)."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        watcher: Watcher | None = None,
        policy: Policy | None = None,
        command: Command = module_command,
        routers_only: bool = False,
    ) -> None:
        """`routers_only`: the workers are elsewhere, as the configuration says."""
        self.config = with_router_ports(config) if routers_only else make_effective(config)
        self._watcher = watcher or SilentWatcher()
        self._command = command
        self._plans = {plan.name: plan for plan in (plan_routers if routers_only else plan_processes)(self.config)}
        self._supervisor = Supervisor(list(self._plans.values()), policy or Policy())
        self._children: dict[str, Child] = {}
        self._ready: dict[str, Mapping[str, Any]] = {}
        self._tails: dict[str, deque[str]] = {name: deque(maxlen=LOG_TAIL_LINES) for name in self._plans}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._files = ExitStack()
        self._config_path = Path()

    async def __aenter__(self) -> Self:
        """Raises ClusterFailed when a process cannot start, StoppedEarly when `request_stop` came first."""
        directory = self._files.enter_context(tempfile.TemporaryDirectory(prefix="tandem-"))
        self._config_path = self._files.enter_context(written(self.config, Path(directory)))
        try:
            self._apply(self._supervisor.start(self._now()))
            await self._until(lambda: self._supervisor.phase in (Phase.RUNNING, Phase.STOPPED))
        except BaseException:
            await self._close(kill=True)
            raise
        if self._supervisor.phase is Phase.STOPPED:
            await self._close()
            self._raise_failure()
            raise StoppedEarly("stopped before it was ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._close(kill=kind is not None)

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP door."""
        address = join(self.config.router.host, self.config.router.port)
        return str(self._router_facts.get("http", f"http://{address}"))

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC door."""
        address = join(self.config.router.host, self.config.router.grpc_port)
        return str(self._router_facts.get("grpc", address))

    @property
    def _router_facts(self) -> Mapping[str, Any]:
        """Of any router process: they share their doors."""
        routers = (name for name, plan in self._plans.items() if plan.role is Role.ROUTER)
        return next((self._ready[name] for name in routers if name in self._ready), {})

    @property
    def processes(self) -> list[ProcessView]:
        """Every process, workers first."""
        return [self._view(name) for name in self._plans]

    @property
    def workers(self) -> list[ProcessView]:
        """Every worker: prefill, then decode."""
        return [view for view in self.processes if view.role is not Role.ROUTER]

    @property
    def failure(self) -> str | None:
        """Why the cluster ended by itself, with the guilty process's last log lines; None while all is well."""
        reason, name = self._supervisor.failure, self._supervisor.failed_name
        if reason is None or name is None:
            return None
        return "\n".join([reason, *self._tails[name]])

    def kill(self, worker_id: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process, named as in `processes` or by its worker id; it will be restarted.

        Raises KeyError when there is none, or none alive.
        """
        name = next((v.name for v in self.processes if worker_id in (v.name, v.worker_id)), worker_id)
        self._children[name].send(signum)

    async def wait_ready(self, name: str, *, after_pid: int | None = None) -> ProcessView:
        """Wait until this process serves (again: with another pid than `after_pid`); ClusterFailed if it never will."""
        dead = (ProcessState.ABANDONED, ProcessState.EXITED)

        def settled() -> bool:
            view = self._view(name)
            return view.state in dead or (view.state is ProcessState.READY and view.pid != after_pid)

        await self._until(settled)
        if self._view(name).state in dead:
            raise ClusterFailed(self.failure or f"{name} is not running")
        return self._view(name)

    async def wait_stopped(self) -> None:
        """Wait until every process has ended. Raises ClusterFailed when nobody had asked for that."""
        await self._until(lambda: self._supervisor.phase is Phase.STOPPED)
        self._raise_failure()

    def request_stop(self) -> None:
        """Begin to drain: the router first, then the workers."""
        self._apply(self._supervisor.stop(self._now()))

    def request_reread(self) -> None:
        """Have the processes look at what may change while they run (`tandem.hangup`)."""
        self._apply(self._supervisor.reread())

    def request_kill(self) -> None:
        """SIGKILL to every process of ours."""
        self._apply(self._supervisor.kill(self._now()))

    async def _close(self, *, kill: bool = False) -> None:
        (self.request_kill if kill else self.request_stop)()
        try:
            await self._until(lambda: self._supervisor.phase is Phase.STOPPED)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._files.close()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise ClusterFailed(self.failure)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def _apply(self, actions: list[Action]) -> None:
        """Carry out, then wake whoever waits and set the alarm for what is due next."""
        for action in actions:
            match action:
                case Launch():
                    self._launch(action.name)
                case Send():
                    if action.name in self._children:
                        self._children[action.name].send(action.signum)
                case Note():
                    self._watcher.on_note(action)
        if self._timer is not None:
            self._timer.cancel()
        wake = self._supervisor.next_wake()
        loop = asyncio.get_running_loop()
        self._timer = None if wake is None else loop.call_at(wake, self._tick)
        self._changed.set()

    def _launch(self, name: str) -> None:
        plan = self._plans[name]
        callbacks = Callbacks(
            on_loading=lambda report: self._watcher.on_loading(name, report),
            on_ready=lambda info: self._on_ready(name, info),
            on_beat=lambda: self._supervisor.on_beat(name, self._now()),
            on_log=lambda line: self._on_log(name, line),
            on_exit=lambda status: self._on_exit(name, status),
        )
        self._tails[name].clear()
        environment = child_environment(os.environ)
        try:
            self._children[name] = Child(
                lambda ready_fd: self._command(plan, self._config_path, ready_fd), environment, callbacks
            )
        except OSError as error:  # out of processes, descriptors or memory: an exit like any other
            self._on_log(name, f"cannot start: {error}")
            asyncio.get_running_loop().call_soon(self._on_exit, name, EXIT_NOT_STARTED)
        self._watcher.on_state(self._view(name))

    def _on_ready(self, name: str, info: Mapping[str, Any]) -> None:
        self._ready[name] = info
        self._apply(self._supervisor.on_ready(name, self._now()))
        self._watcher.on_state(self._view(name))

    def _on_log(self, name: str, line: str) -> None:
        self._tails[name].append(line)
        self._watcher.on_log(name, line)

    def _on_exit(self, name: str, status: int) -> None:
        self._children.pop(name, None)
        self._apply(self._supervisor.on_exited(name, status, self._now()))
        self._watcher.on_state(self._view(name))

    def _tick(self) -> None:
        self._apply(self._supervisor.tick(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _view(self, name: str) -> ProcessView:
        plan, child = self._plans[name], self._children.get(name)
        pools = {Role.PREFILL: self.config.prefill, Role.DECODE: self.config.decode}
        router = join(self.config.router.host, self.config.router.port)
        return ProcessView(
            name=name,
            role=plan.role,
            state=self._supervisor.state(name),
            pid=child.pid if child else None,
            address=router if plan.role is Role.ROUTER else pools[plan.role].addresses[plan.index],
            ready=self._ready.get(name, {}),
        )
