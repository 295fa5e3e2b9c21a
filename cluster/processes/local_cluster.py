"""A whole cluster: real processes, started, supervised, changed and stopped.

`async with LocalCluster(config) as cluster:` enters when every process serves and leaves when all have drained.
`cluster.processes.supervised` carries out decisions meanwhile; the launcher determines where processes run, by default
on this machine.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.processes.effective_config import module_command, plan_processes, plan_routers
from cluster.processes.launcher import Command, Launcher, LocalLauncher
from cluster.processes.shared_config import SharedConfig
from cluster.processes.supervised import SupervisedProcesses
from cluster.supervisor.exceptions import ChangeFailed, ClusterFailed, StoppedEarly
from cluster.supervisor.process_view import ProcessView, SilentWatcher, Watcher
from cluster.supervisor.rollout import Member, Rollout, RolloutState
from cluster.supervisor.supervisor import Phase, ProcessState, RestartPolicy, Role, Supervisor
from tandem.config.cluster import ClusterConfig
from tandem.rpc.hosts import join


class LocalCluster:
    """Processes of one configuration. Enter and leave it on the thread that lives longest (see Child)."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        watcher: Watcher | None = None,
        policy: RestartPolicy | None = None,
        command: Command = module_command,
        routers_only: bool = False,
        launcher: Launcher | None = None,
    ) -> None:
        """`routers_only`: the workers run elsewhere, as configured. `launcher` replaces this machine's, which runs
        `command`.
        """
        self._launcher = launcher or LocalLauncher(command, routers_only=routers_only)
        self.shared = SharedConfig(self._launcher, config)
        self.routers_only = routers_only
        plans = (plan_routers if routers_only else plan_processes)(self.config)
        self._supervisor = Supervisor(list(plans), policy or RestartPolicy())
        self._processes = SupervisedProcesses(
            self._supervisor,
            self._launcher,
            self.shared,
            watcher or SilentWatcher(),
            names_workers=not routers_only,
        )

    async def __aenter__(self) -> Self:
        """Start all processes. Raises ClusterFailed if one cannot start, StoppedEarly if `request_stop` came first."""
        self._launcher.open(self.config)
        try:
            self._processes.start()
            await self._processes.until(lambda: self._supervisor.phase in (Phase.RUNNING, Phase.STOPPED))
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
        """Configuration that every process reads."""
        return self.shared.config

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP server."""
        address = join(self.config.router.host, self.config.router.port)
        return str(self._processes.table.router_facts().get("http", f"http://{address}"))

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC server, host:port."""
        address = join(self.config.router.host, self.config.router.grpc_port)
        return str(self._processes.table.router_facts().get("grpc", address))

    @property
    def runs_here(self) -> bool:
        """Whether the workers are processes of this machine."""
        return isinstance(self._launcher, LocalLauncher) and not self.routers_only

    @property
    def config_path(self) -> Path:
        """Path of the configuration file, for a cluster on this machine."""
        return self._launcher.config_path

    @property
    def processes(self) -> list[ProcessView]:
        """List every process, workers first."""
        return [self._processes.view(name) for name in self._processes.table]

    @property
    def workers(self) -> list[ProcessView]:
        """List every worker: prefill, then decode."""
        return [view for view in self.processes if view.role is not Role.ROUTER]

    @property
    def failure(self) -> str | None:
        """Reason why the cluster ended by itself, with the failed process's last log lines; None while all is well."""
        reason, name = self._supervisor.failure, self._supervisor.failed_name
        if reason is None or name is None:
            return None
        return "\n".join([reason, *self._processes.table.tail(name)])

    def kill(self, worker_id: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process, named as in `processes` or by its worker id; it will be restarted.

        Raises KeyError if it does not exist or is not running.
        """
        name = next((v.name for v in self.processes if worker_id in (v.name, v.worker_id)), worker_id)
        self._processes.table.send(name, signum)

    async def wait_ready(self, name: str, *, after_pid: int | None = None) -> ProcessView:
        """Wait until this process serves (again: with another pid than `after_pid`); ClusterFailed if it never will."""
        dead, processes = (ProcessState.ABANDONED, ProcessState.EXITED), self._processes

        def settled() -> bool:
            if name not in processes.table:
                return True
            view = processes.view(name)
            return view.state in dead or (view.state is ProcessState.READY and view.pid != after_pid)

        await processes.until(settled)
        if name not in processes.table or processes.view(name).state in dead:
            raise ClusterFailed(self.failure or f"{name} is not running")
        return processes.view(name)

    async def wait_stopped(self) -> None:
        """Wait until every process has ended. Raises ClusterFailed unless a stop was requested."""
        await self._processes.until(lambda: self._supervisor.phase is Phase.STOPPED)
        self._raise_failure()

    def request_stop(self) -> None:
        """Begin to drain: the router first, then the workers."""
        self._processes.stop()

    def request_reread(self) -> None:
        """Have the processes reload the settings that may change while they run (`tandem.process.hangup`)."""
        self._processes.reread()

    def request_kill(self) -> None:
        """Send SIGKILL to every process."""
        self._processes.kill()

    @property
    def is_ending(self) -> bool:
        """Whether the cluster is draining or has ended, so that its files may be gone."""
        return self._supervisor.phase in (Phase.STOPPING, Phase.STOPPED)

    @property
    def under_way(self) -> Rollout | None:
        """Change in progress, or None."""
        return self._processes.rollout

    async def change(self, rollout: Rollout, report: Callable[[str], None]) -> None:
        """Carry out a change of the running cluster; `report` is called with its progress. Raises ChangeFailed.

        Only one change at a time is possible. Cancelling this call does not end the change.
        """
        if self.under_way is not None:
            raise ChangeFailed("another change is in progress")
        self._processes.begin(rollout, report)
        await self._processes.until(lambda: rollout.state is not RolloutState.UNDER_WAY)
        await asyncio.sleep(0)  # deliver the last progress before the end
        if rollout.failure is not None:
            raise ChangeFailed(rollout.failure)

    async def abort(self, reason: str) -> None:
        """Abort the change in progress; finished steps stay, and the present one is undone if possible."""
        if (rollout := self.under_way) is not None:
            rollout.abort(reason)
            self._processes.apply([])
            await self._processes.until(lambda: self.under_way is not rollout)

    def members(self) -> dict[str, Member]:
        """Return every process as a rollout sees it."""
        return self._processes.table.members()

    async def _close(self, *, kill: bool = False) -> None:
        (self.request_kill if kill else self.request_stop)()
        try:
            await self._processes.until(lambda: self._supervisor.phase is Phase.STOPPED)
        finally:
            self._processes.cancel_alarm()
            self._launcher.close()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise ClusterFailed(self.failure)
