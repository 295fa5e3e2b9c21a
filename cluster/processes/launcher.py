"""Launches processes: the interface between the supervisor and the place where they run.

`LocalLauncher` starts them on this machine (`cluster.processes.child`). A launcher that starts them elsewhere calls the
same callbacks, and names a worker's address in its ready line.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cluster.processes.child import Callbacks, Child
from cluster.processes.effective_config import (
    PortDrawer,
    child_environment,
    make_effective,
    module_command,
    place_arguments,
    plan_processes,
    plan_router,
    plan_worker,
    rewrite,
    stated_ports,
    with_router_ports,
    written,
)
from cluster.processes.standby import StandbyWorkers
from cluster.processes.worker_gpus import WorkerGpus
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.process.gpu_host import GpuHost, NvidiaHost
from tandem.process.host_memory import free_memory_bytes
from tandem.process.runtime_folder import make_private_folder
from tandem.rpc.hosts import join
from tandem.values.roles import WorkerRole

Command = Callable[[ProcessPlan, Path, int], Sequence[str]]
"""Function that returns a process's command line, from its plan, the configuration's path, and its ready descriptor."""
EXIT_NOT_STARTED = 127
"""Exit status of a process that could not be started, as in shells."""


class Launched(Protocol):
    """Handle of a process that was started."""

    @property
    def pid(self) -> int | None:
        """Process id; None when unknown."""
        ...

    def send(self, signum: signal.Signals) -> None:
        """Signal it; does nothing once it has ended."""
        ...


LEAST_WORKER_BYTES = 150 << 20
"""Memory that a worker's process has for itself, at the very least: with the built-in model it is some 185 MB."""


class Launcher(Protocol):
    """Starts the processes of one cluster. Called on the event loop, on one thread."""

    @property
    def config_path(self) -> Path:
        """Path of the configuration file, once `open` was called."""
        ...

    def settle(self, config: ClusterConfig) -> ClusterConfig:
        """Fill in what the user left open, such as ports. Raises ConfigError for impossible settings."""
        ...

    def open(self, config: ClusterConfig) -> None:
        """Publish the configuration, before the first process starts."""
        ...

    def configure(self, config: ClusterConfig) -> None:
        """Replace the configuration that processes read on SIGHUP or when they start."""
        ...

    def address(self, config: ClusterConfig, role: Role) -> str:
        """Address for one more worker; empty if it is known only when the worker serves."""
        ...

    def replace(self, name: str, retired: str) -> None:
        """Let the next process of this name take the place of the other, which is leaving or has left."""
        ...

    def start(self, plan: ProcessPlan, callbacks: Callbacks) -> Launched:
        """Start a process. Raises OSError on failure."""
        ...

    def close(self) -> None:
        """Clean up after every process has ended."""
        ...


def check_memory(config: ClusterConfig, free_bytes: int) -> None:
    """Raise ConfigError unless so much memory can hold the workers' processes, without model and KV.

    They would all start at once, and take other programs' memory before any of them could report an error.
    """
    pools = {"prefill": config.prefill, "decode": config.decode}
    num_processes = sum(pool.replicas * pool.ranks_per_node for pool in pools.values()) + config.standby_workers
    if num_processes * LEAST_WORKER_BYTES <= free_bytes:
        return
    name, largest = max(pools.items(), key=lambda item: item[1].replicas * item[1].ranks_per_node)
    raise ConfigError(
        f"{name}.replicas is {largest.replicas}: {num_processes} worker processes (with ranks and standbys) need at "
        f"least {num_processes * LEAST_WORKER_BYTES / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB are free here"
    )


def plan_one_more(launcher: Launcher, config: ClusterConfig, role: Role, index: int) -> ProcessPlan:
    """Plan one more process. Raises ConfigError."""
    if role is Role.ROUTER:
        return plan_router(config, index)
    return plan_worker(config, role, index, launcher.address(config, role))


class LocalLauncher:
    """Starts processes on this machine, each in its own session. Use it on the longest-lived thread (see Child)."""

    def __init__(
        self, command: Command = module_command, *, routers_only: bool = False, gpus: GpuHost | None = None
    ) -> None:
        """`routers_only`: the workers run elsewhere, as the configuration says. `gpus`: those of this machine."""
        self._command = command
        self._routers_only = routers_only
        self._gpus = WorkerGpus(gpus or NvidiaHost(os.environ))
        self._standby: StandbyWorkers | None = None
        self._started: set[str] = set()
        """Names of the processes that were started: if they die, they are restarted."""
        self._files = ExitStack()
        self._config = ClusterConfig()
        self.config_path = Path()
        """Path of the file that every process reads, once `open` was called."""

    def settle(self, config: ClusterConfig) -> ClusterConfig:
        """Choose free ports for those that are 0. Raises ConfigError; also for more workers than memory can hold."""
        if self._routers_only:
            return with_router_ports(config)
        check_memory(config, free_memory_bytes())
        return make_effective(config)

    def open(self, config: ClusterConfig) -> None:
        """Write the file that all processes read, in a folder that only this user can enter."""
        directory = self._files.enter_context(tempfile.TemporaryDirectory(prefix="tandem-"))
        self.config_path = self._files.enter_context(written(config, Path(directory)))
        self._config = config
        if not self._routers_only:
            self._gpus.plan(config, plan_processes(config))
            if config.standby_workers and self._command is module_command:
                self._standby = StandbyWorkers(config.standby_workers, lambda: child_environment(os.environ))

    def configure(self, config: ClusterConfig) -> None:
        """Replace that file atomically. Raises OSError."""
        try:
            make_private_folder(self.config_path.parent, "configuration")
        except ConfigError as error:
            raise OSError(str(error)) from None
        rewrite(config, self.config_path)
        self._config = config

    def address(self, config: ClusterConfig, role: Role) -> str:
        """Choose a free port of the pool's host. Raises ConfigError."""
        pool = config.prefill if role is Role.PREFILL else config.decode
        with PortDrawer(stated_ports(config)) as ports:
            return join(pool.host, ports.draw(pool.host, f"{role.value}.host"))

    def replace(self, name: str, retired: str) -> None:
        """Place the new process on the same GPUs."""
        self._started -= {name, retired}
        self._gpus.replace(name, retired)

    def start(self, plan: ProcessPlan, callbacks: Callbacks) -> Child:
        """Start a process here. Raises OSError when the machine is out of processes, descriptors or memory."""
        if not self.config_path.exists():  # temporary folders are cleared of old files
            self.configure(self._config)
        place = self._gpus.arguments(self._config, plan)

        def ended(status: int) -> None:
            if status == 0:
                self._started.discard(plan.name)  # it ended as requested
            self._gpus.leave(plan.name)
            callbacks.on_exit(status)

        ours = replace(callbacks, on_exit=ended)
        if self._standby is not None:
            ours = self._standby.observed(plan.name, ours)
            if plan.name not in self._started:
                # The user requested this, perhaps because another version was installed since the standbys imported
                # theirs.
                self._standby.discard()
                self._started.add(plan.name)
            elif plan.role is not Role.ROUTER:
                arguments = [*place_arguments(plan, self.config_path), *place]
                if (child := self._standby.start(WorkerRole(plan.role.value), arguments, ours)) is not None:
                    return child
        environment = child_environment(os.environ)
        return Child(lambda ready_fd: [*self._command(plan, self.config_path, ready_fd), *place], environment, ours)

    def close(self) -> None:
        """Kill the standby workers and remove the configuration file."""
        if self._standby is not None:
            self._standby.close()
        self._files.close()
