"""A whole cluster: real processes, started, supervised, changed and stopped.

`async with LocalCluster(config) as cluster:` enters when every process serves and leaves when all have drained. It
only carries facts to `cluster.supervisor` and `cluster.rollout`, and carries out what they decide; where the processes
run is its launcher's business, by default this machine.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.child import Callbacks
from cluster.effective import module_command, plan_processes, plan_routers
from cluster.endings import ChangeFailed, ClusterFailed, StoppedEarly
from cluster.launcher import Command, Launched, Launcher, LocalLauncher, plan_one_more
from cluster.process_view import ProcessView, SilentWatcher, Watcher
from cluster.rollout import Add, Member, Progress, Retire, Rollout, RolloutState
from cluster.shared_config import SharedConfig
from cluster.supervisor import Action, Gone, Launch, Note, Phase, Policy, ProcessState, Role, Send, Supervisor
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.hosts import join
from tandem.process import REACHES

LOG_TAIL_LINES = 20
EXIT_NOT_STARTED = 127


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
        launcher: Launcher | None = None,
    ) -> None:
        """`routers_only`: the workers are elsewhere, as the configuration says. `launcher`: in place of this machine's,
        which starts processes by `command`.
        """
        self._launcher = launcher or LocalLauncher(command, routers_only=routers_only)
        self.shared = SharedConfig(self._launcher, config)
        self.routers_only = routers_only
        self._watcher = watcher or SilentWatcher()
        self._plans = {plan.name: plan for plan in (plan_routers if routers_only else plan_processes)(self.config)}
        self._supervisor = Supervisor(list(self._plans.values()), policy or Policy())
        self._children: dict[str, Launched] = {}
        self._ready: dict[str, Mapping[str, Any]] = {}
        self._reaches: dict[str, frozenset[str]] = {}
        """Of routers: the addresses of the workers that answer them."""
        self._outdated: set[str] = set()
        """Processes that were starting when the configuration last changed."""
        self._rollout: Rollout | None = None
        self._tell: Callable[[str], None] = _nobody
        self._tails: dict[str, deque[str]] = {name: deque(maxlen=LOG_TAIL_LINES) for name in self._plans}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Raises ClusterFailed when a process cannot start, StoppedEarly when `request_stop` came first."""
        self._launcher.open(self.config)
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
    def config(self) -> ClusterConfig:
        """What every process reads."""
        return self.shared.config

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
    def runs_here(self) -> bool:
        """Whether the workers are processes of this machine."""
        return isinstance(self._launcher, LocalLauncher) and not self.routers_only

    @property
    def config_path(self) -> Path:
        """What every process reads, of a cluster on this machine."""
        return self._launcher.config_path

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
        return "\n".join([reason, *self._tails.get(name, ())])

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
            if name not in self._plans:
                return True
            view = self._view(name)
            return view.state in dead or (view.state is ProcessState.READY and view.pid != after_pid)

        await self._until(settled)
        if name not in self._plans or self._view(name).state in dead:
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

    @property
    def under_way(self) -> Rollout | None:
        """The change that is being carried out."""
        return self._rollout

    async def change(self, rollout: Rollout, tell: Callable[[str], None]) -> None:
        """Carry out a change of the running cluster; `tell` hears how it goes. Raises ChangeFailed.

        One at a time. Whoever gives up waiting does not end it.
        """
        if self._rollout is not None:
            raise ChangeFailed("another change is under way")
        self._rollout, self._tell = rollout, tell
        try:
            self._apply([])
        except BaseException:
            self._rollout, self._tell = None, _nobody
            raise
        await self._until(lambda: rollout.state is not RolloutState.UNDER_WAY)
        await asyncio.sleep(0)  # what was told last is heard before the end is
        if rollout.failure is not None:
            raise ChangeFailed(rollout.failure)

    async def abort(self, reason: str) -> None:
        """End the change that is under way; what it has done stays, what it has begun is undone where it can be."""
        if (rollout := self._rollout) is not None:
            rollout.abort(reason)
            self._apply([])
            await self._until(lambda: self._rollout is not rollout)

    def members(self) -> dict[str, Member]:
        """Every process as a change sees it."""
        return {name: self._member(name) for name in self._plans}

    async def _close(self, *, kill: bool = False) -> None:
        (self.request_kill if kill else self.request_stop)()
        try:
            await self._until(lambda: self._supervisor.phase is Phase.STOPPED)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._launcher.close()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise ClusterFailed(self.failure)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def _apply(self, actions: list[Action]) -> None:
        """Carry out, then wake whoever waits and set the alarm for what is due next."""
        self._carry_out(actions)
        self._advance()
        if self._timer is not None:
            self._timer.cancel()
        wakes = (self._supervisor.next_wake(), None if self._rollout is None else self._rollout.next_wake())
        wake = min((at for at in wakes if at is not None), default=None)
        loop = asyncio.get_running_loop()
        self._timer = None if wake is None else loop.call_at(wake, self._tick)
        self._changed.set()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._launch(action.name)
                case Send():
                    if action.name in self._children:
                        self._children[action.name].send(action.signum)
                case Note():
                    self._watcher.on_note(action)
                case Gone():
                    self._forget(action)

    def _advance(self) -> None:
        """Go on with the change that is under way, as far as it goes by now."""
        if (rollout := self._rollout) is None:
            return
        if self._supervisor.phase is not Phase.RUNNING:
            rollout.abandon(f"the cluster is {self._supervisor.phase.value}")
        while orders := rollout.advance(self.members(), self._now()):
            for order in orders:
                match order:
                    case Add():
                        self._add(order, rollout)
                    case Retire():
                        self._retire(order.name)
                    case Progress():
                        # In a turn of its own: whoever hears it may want something of us.
                        asyncio.get_running_loop().call_soon(self._tell, order.text)
        if rollout.state is not RolloutState.UNDER_WAY:
            self._rollout, self._tell = None, _nobody

    def _add(self, order: Add, rollout: Rollout) -> None:
        try:
            plan = plan_one_more(self._launcher, self.config, order.role, order.index)
        except ConfigError as error:  # no free port
            rollout.abandon(str(error))
            return
        self._plans[plan.name] = plan
        self._tails[plan.name] = deque(maxlen=LOG_TAIL_LINES)
        rollout.started(plan.name)
        self._carry_out(self._supervisor.add(plan, self._now(), is_needed=order.is_needed))
        self._publish()  # whom it replaces has left: who waits for a worker knows that one comes

    def _retire(self, name: str) -> None:
        actions = self._supervisor.retire(name, self._now())
        self._carry_out([action for action in actions if isinstance(action, Gone)])  # it was dead: ask no more of it
        # Routers keep the session that is up; they will not look for another one at this address.
        self._publish()
        self._carry_out([action for action in actions if not isinstance(action, Gone)])

    def _forget(self, gone: Gone) -> None:
        name = gone.name
        failure = None if gone.failure is None else ": ".join([gone.failure, *list(self._tails[name])[-1:]])
        for known in (self._plans, self._tails, self._ready, self._reaches):
            known.pop(name, None)
        text = "has left" if failure is None else f"is given up: {failure}"
        self._watcher.on_note(Note(name=name, text=text, is_error=failure is not None))
        if self._rollout is not None:
            self._rollout.gone(name, failure)

    def _publish(self) -> None:
        """Where the workers are, for routers to read."""
        if self.routers_only:
            return
        prefill, decode = self._addresses(Role.PREFILL), self._addresses(Role.DECODE)
        try:
            if not self.shared.name_workers(prefill=prefill, decode=decode):
                return
        except OSError as error:  # routers go on with what they know, and hear of it when it can be written again
            self._watcher.on_note(Note(name="configuration", text=f"cannot be written: {error}", is_error=True))
            return
        self._outdated |= {name for name in self._plans if self._supervisor.state(name) is ProcessState.STARTING}
        self._carry_out(self._supervisor.reread(Role.ROUTER))

    def _addresses(self, role: Role) -> tuple[str, ...]:
        plans = [plan for name, plan in self._plans.items() if plan.role is role and self._supervisor.is_member(name)]
        return tuple(plan.address for plan in plans if plan.address)

    def _launch(self, name: str) -> None:
        plan = self._plans[name]
        callbacks = Callbacks(
            on_loading=lambda report: self._watcher.on_loading(name, report),
            on_ready=lambda info: self._on_ready(name, info),
            on_beat=lambda: self._supervisor.on_beat(name, self._now()),
            on_news=lambda news: self._on_news(name, news),
            on_log=lambda line: self._on_log(name, line),
            on_exit=lambda status: self._on_exit(name, status),
            on_room=lambda has_room: self._on_room(name, has_room),
        )
        self._tails[name].clear()
        self._reaches.pop(name, None)
        self._outdated.discard(name)
        try:
            self._children[name] = self._launcher.start(plan, callbacks)
        except OSError as error:  # out of processes, descriptors or memory: an exit like any other
            self._on_log(name, f"cannot start: {error}")
            asyncio.get_running_loop().call_soon(self._on_exit, name, EXIT_NOT_STARTED)
        self._watcher.on_state(self._view(name))

    def _on_room(self, name: str, has_room: bool) -> None:
        self._supervisor.on_room(name, has_room, self._now())
        self._apply([])

    def _on_ready(self, name: str, info: Mapping[str, Any]) -> None:
        self._ready[name] = info
        plan = self._plans[name]
        if plan.role is not Role.ROUTER and (told := str(info.get("address") or plan.address)) != plan.address:
            self._plans[name] = replace(plan, address=told)
        actions = self._supervisor.on_ready(name, self._now())
        self._publish()
        if name in self._outdated:  # it may have read what was right when it began
            actions.append(Send(name=name, signum=signal.SIGHUP))
        self._outdated.discard(name)
        self._apply(actions)
        self._watcher.on_state(self._view(name))

    def _on_news(self, name: str, news: Mapping[str, Any]) -> None:
        if isinstance(reached := news.get(REACHES), list):
            self._reaches[name] = frozenset(map(str, reached))
            self._apply([])

    def _on_log(self, name: str, line: str) -> None:
        self._tails[name].append(line)
        self._watcher.on_log(name, line)

    def _on_exit(self, name: str, status: int) -> None:
        self._children.pop(name, None)
        self._apply(self._supervisor.on_exited(name, status, self._now()))
        if name in self._plans:
            self._watcher.on_state(self._view(name))

    def _tick(self) -> None:
        self._apply(self._supervisor.tick(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _member(self, name: str) -> Member:
        plan = self._plans[name]
        state, reaches = self._supervisor.state(name), self._reaches.get(name)
        return Member(role=plan.role, index=plan.index, state=state, address=plan.address, reaches=reaches)

    def _view(self, name: str) -> ProcessView:
        plan, child = self._plans[name], self._children.get(name)
        door = join(self.config.router.host, self.config.router.port)
        return ProcessView(
            name=name,
            role=plan.role,
            state=self._supervisor.state(name),
            pid=child.pid if child else None,
            address=door if plan.role is Role.ROUTER else plan.address,
            ready=self._ready.get(name, {}),
        )


def _nobody(_text: str) -> None:
    """Until somebody asks for a change."""
