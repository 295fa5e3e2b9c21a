"""Connects running processes to the supervisor and a rollout: passes events in and executes their decisions."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cluster.processes.child import Callbacks
from cluster.processes.launcher import EXIT_NOT_STARTED, Launcher, plan_one_more
from cluster.processes.process_table import ProcessTable
from cluster.processes.shared_config import SharedConfig
from cluster.supervisor.process_view import ProcessView, Watcher
from cluster.supervisor.rollout import Add, Progress, Retire, Rollout, RolloutState
from cluster.supervisor.supervisor import Action, Gone, Launch, Note, Phase, Role, Send, Supervisor
from tandem.errors import ConfigError
from tandem.rpc.hosts import join

_WRITE_AGAIN_S = 5.0
"""Delay before another try after the configuration could not be written."""


class SupervisedProcesses:
    """Runs the processes of one cluster. Use it on the event loop."""

    def __init__(
        self,
        supervisor: Supervisor,
        launcher: Launcher,
        shared: SharedConfig,
        watcher: Watcher,
        *,
        names_workers: bool,
    ) -> None:
        """`names_workers`: publish worker addresses to routers, since the workers are among these processes."""
        self.supervisor = supervisor
        self.table = ProcessTable(supervisor.plans, supervisor.state)
        self.rollout: Rollout | None = None
        """Change in progress, or None."""
        self._report: Callable[[str], None] = _nobody
        self._launcher = launcher
        self._shared = shared
        self._watcher = watcher
        self._names_workers = names_workers
        self._timer: asyncio.TimerHandle | None = None
        self._publish_at: float | None = None
        """Time of the next attempt to write the configuration."""
        self._changed = asyncio.Event()

    def view(self, name: str) -> ProcessView:
        """Return the user's view of a process. Raises KeyError."""
        router = self._shared.config.router
        return self.table.view(name, router_address=join(router.host, router.port))

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until a predicate holds; it is checked whenever something has changed."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def start(self) -> None:
        """Start all processes, workers first."""
        self.apply(self.supervisor.start(_now()))

    def stop(self) -> None:
        """Begin to drain, routers first."""
        self.apply(self.supervisor.stop(_now()))

    def kill(self) -> None:
        self.apply(self.supervisor.kill(_now()))

    def reread(self) -> None:
        """Have all processes reload the settings that may change while they run."""
        self.apply(self.supervisor.reread())

    def begin(self, rollout: Rollout, report: Callable[[str], None]) -> None:
        """Start this change; `report` is called with its progress."""
        self.rollout, self._report = rollout, report
        try:
            self.apply([])
        except BaseException:
            self.rollout, self._report = None, _nobody
            raise

    def apply(self, actions: list[Action]) -> None:
        """Carry out the actions, then wake waiters and set the timer for what is due next."""
        self._carry_out(actions)
        self._advance()
        self.cancel_alarm()
        of_change = None if self.rollout is None else self.rollout.next_wake()
        wakes = (self.supervisor.next_wake(), of_change, self._publish_at)
        wake = min((at for at in wakes if at is not None), default=None)
        self._timer = None if wake is None else asyncio.get_running_loop().call_at(wake, self._tick)
        self._changed.set()

    def cancel_alarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._launch(action.name)
                case Send():
                    if self.table.is_alive(action.name):
                        self.table.send(action.name, action.signum)
                case Note():
                    self._watcher.on_note(action)
                case Gone():
                    self._forget(action)

    def _advance(self) -> None:
        """Advance the change in progress as far as possible."""
        if (rollout := self.rollout) is None:
            return
        if self.supervisor.phase is not Phase.RUNNING:
            rollout.abandon(f"the cluster is {self.supervisor.phase.value}")
        while orders := rollout.advance(self.table.members(), _now()):
            for order in orders:
                match order:
                    case Add():
                        self._add(order, rollout)
                    case Retire():
                        self._retire(order.name)
                    case Progress():
                        # In a turn of its own: the callback may call back into this object.
                        asyncio.get_running_loop().call_soon(self._report, order.text)
        if rollout.state is not RolloutState.UNDER_WAY:
            self.rollout, self._report = None, _nobody

    def _add(self, order: Add, rollout: Rollout) -> None:
        try:
            plan = plan_one_more(self._launcher, self._shared.config, order.role, order.index)
        except ConfigError as error:  # no free port
            rollout.abandon(str(error))
            return
        if order.replaces is not None:
            self._launcher.replace(plan.name, order.replaces)
        self.table.add(plan)
        rollout.started(plan.name)
        self._carry_out(self.supervisor.add(plan, _now(), is_needed=order.is_needed))
        self._publish()  # The one it replaces has left: now routers learn the address of the new worker.

    def _retire(self, name: str) -> None:
        actions = self.supervisor.retire(name, _now())
        self._carry_out(
            [action for action in actions if isinstance(action, Gone)]
        )  # it was not running, so nothing else must be done
        # Routers keep the session that exists, and will not connect to this address again.
        self._publish()
        self._carry_out([action for action in actions if not isinstance(action, Gone)])

    def _forget(self, gone: Gone) -> None:
        name, last_line = gone.name, self.table.tail(gone.name)[-1:]
        failure = None if gone.failure is None else ": ".join([gone.failure, *last_line])
        self.table.forget(name)
        if failure is not None:
            self._watcher.on_note(Note(name=name, text=f"was abandoned: {failure}", is_error=True))
        elif self.rollout is None or not self.rollout.reports_end(name):
            self._watcher.on_note(Note(name=name, text="has left"))
        if self.rollout is not None:
            self.rollout.on_exit(name, failure)

    def _publish(self) -> None:
        """Publish the workers' addresses to routers."""
        if not self._names_workers:
            return
        prefill, decode = self._addresses(Role.PREFILL), self._addresses(Role.DECODE)
        tried_at, self._publish_at = self._publish_at, None
        try:
            if not self._shared.name_workers(prefill=prefill, decode=decode):
                return
        except OSError as error:  # routers keep what they have, and are notified once it can be written again
            self._publish_at = _now() + _WRITE_AGAIN_S
            if tried_at is None:
                self._watcher.on_note(Note(name="configuration", text=f"cannot write it: {error}", is_error=True))
            return
        self._carry_out(self.supervisor.reread(Role.ROUTER))

    def _addresses(self, role: Role) -> tuple[str, ...]:
        plans = [self.table.plan(name) for name in self.table if self.supervisor.is_member(name)]
        return tuple(plan.address for plan in plans if plan.role is role and plan.address)

    def _launch(self, name: str) -> None:
        callbacks = Callbacks(
            on_loading=lambda report: self._watcher.on_loading(name, report),
            on_ready=lambda info: self._on_ready(name, info),
            on_beat=lambda: self.supervisor.on_beat(name, _now()),
            on_news=lambda news: self._on_news(name, news),
            on_log=lambda line: self._on_log(name, line),
            on_exit=lambda status: self._on_exit(name, status),
            on_room=lambda has_room: self._on_room(name, has_room),
        )
        self.table.record_launch(name)
        try:
            self.table.record_started(name, self._launcher.start(self.table.plan(name), callbacks))
        except OSError as error:  # out of processes, descriptors or memory: handled like any other exit
            self._on_log(name, f"cannot start: {error}")
            asyncio.get_running_loop().call_soon(self._on_exit, name, EXIT_NOT_STARTED)
        self._watcher.on_state(self.view(name))

    def _on_room(self, name: str, has_room: bool) -> None:
        self.supervisor.on_room(name, has_room, _now())
        self.apply([])

    def _on_ready(self, name: str, info: Mapping[str, Any]) -> None:
        self.table.record_ready(name, info)
        actions = self.supervisor.on_ready(name, _now())
        self._publish()
        self.apply(actions)
        self._watcher.on_state(self.view(name))

    def _on_news(self, name: str, news: Mapping[str, Any]) -> None:
        if self.table.record_message(name, news):
            self.apply([])

    def _on_log(self, name: str, line: str) -> None:
        self.table.record_output(name, line)
        self._watcher.on_log(name, line)

    def _on_exit(self, name: str, status: int) -> None:
        self.table.record_exit(name)
        self.apply(self.supervisor.on_exited(name, status, _now()))
        if name in self.table:
            self._watcher.on_state(self.view(name))

    def _tick(self) -> None:
        if self._publish_at is not None and self._publish_at <= _now():
            self._publish()
        self.apply(self.supervisor.tick(_now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _nobody(_text: str) -> None:
    """Ignore progress while no change is in progress."""
