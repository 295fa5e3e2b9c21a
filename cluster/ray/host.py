"""The actor of one worker: starts the worker's real main on its node, reports its events, and signals it.

The process is a child of the actor's (`cluster.processes.child`): the kernel kills it when the actor's process ends,
and Ray ends that with `tandem up` or with the node. If Ray fails to do so, an actor that has received no call for
`lease_s` ends by itself. The configuration, secrets included, comes in a call from `tandem up` directly to the actor,
never in its constructor, which Ray stores; here it is in memory only, readable by this user's processes alone.

Nothing here runs in `tandem up`, and only `where` needs Ray.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.processes.child import Child
    from cluster.supervisor.supervisor import ProcessPlan
    from tandem.process.silence import SilenceWatch

Word = tuple[str, Any]
"""Event as its kind and value; kinds are loading, ready, beat, news, log and exit."""
LISTEN_S = 1.0
"""Maximum wait of `listen`: an actor without news returns then, to show that it is alive."""
_LOOKS = 8
"""Number of checks of the lease within its duration."""
MAX_LOG_BYTES = 1 << 18
"""Maximum bytes of log lines not fetched yet; the oldest are dropped first, and counted."""


class Outbox:
    """Buffers events until they are fetched. Pure; log lines are bounded, everything else is small and kept."""

    def __init__(self, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._max_log_bytes = max_log_bytes
        self._lines: deque[str] = deque()
        self._log_bytes = 0
        self._lost = 0
        self._words: list[Word] = []
        self._is_beating = False
        self._status: int | None = None

    def __bool__(self) -> bool:
        return bool(self._lines or self._words or self._is_beating or self._status is not None)

    def log(self, line: str) -> None:
        """Add a log line of the process."""
        self._lines.append(line)
        self._log_bytes += len(line)
        while self._log_bytes > self._max_log_bytes and len(self._lines) > 1:
            self._log_bytes -= len(self._lines.popleft())
            self._lost += 1

    def beat(self) -> None:
        """Add a heartbeat; several are reported as one."""
        self._is_beating = True

    def say(self, kind: str, value: Any) -> None:
        """Add any other event except the end."""
        self._words.append((kind, value))

    def end(self, status: int) -> None:
        """Add the end of the process, which is reported last."""
        self._status = status

    def drain(self) -> list[Word]:
        """Return all events in order; log lines come first, since a process writes before it ends."""
        lost = [("log", f"{self._lost} lines were dropped because they were not fetched in time")] if self._lost else []
        words: list[Word] = [*lost, *(("log", line) for line in self._lines), *self._words]
        words += [("beat", None)] if self._is_beating else []
        words += [] if self._status is None else [("exit", self._status)]
        self._lines.clear()
        self._words = []
        self._log_bytes = self._lost = 0
        self._is_beating, self._status = False, None
        return words


class WorkerHost:
    """Ray actor of one worker. Its methods are called only by `cluster.ray.launcher`, with plain values."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._outbox = Outbox()
        self._news: asyncio.Event | None = None
        self._config_fd: int | None = None
        self._child: Child | None = None
        self._lease: SilenceWatch | None = None
        self._look: asyncio.TimerHandle | None = None

    async def where(self) -> tuple[str, str]:
        """Return the id and address of this node."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    async def start(self, role: str, index: int, address: str, config: str) -> int:
        """Start the worker and return its pid. Raises ConfigError or OSError."""
        from cluster.processes.child import Child
        from cluster.supervisor.supervisor import ProcessPlan, Role

        self._news = asyncio.Event()
        self._config_fd = os.memfd_create("tandem-cluster.yaml", os.MFD_CLOEXEC)
        await self.configure(config)
        plan = ProcessPlan(name=f"{role}-{index}", role=Role(role), index=index, address=address)
        path = Path(f"/proc/{os.getpid()}/fd/{self._config_fd}")
        self._child = Child(lambda ready_fd: _command(plan, path, ready_fd), _environment(), self._callbacks())
        self._renew()
        return self._child.pid

    async def configure(self, config: str) -> None:
        """Replace what the worker reads when it starts and upon SIGHUP."""
        assert self._config_fd is not None  # noqa: S101  # narrows: `start` has set it
        text = (await asyncio.to_thread(_on_this_node, config)).encode()
        os.ftruncate(self._config_fd, 0)
        os.pwrite(self._config_fd, text, 0)

    async def listen(self) -> list[Word]:
        """Return the events since the last call, as soon as there is one."""
        assert self._news is not None  # noqa: S101  # narrows: `start` has set it
        self._renew()
        if not self._outbox:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), LISTEN_S)
            except TimeoutError:
                return []
        return self._outbox.drain()

    async def send(self, signum: int) -> None:
        if self._child is not None:
            self._child.send(signal.Signals(signum))

    def _callbacks(self) -> Any:
        from cluster.processes.child import Callbacks

        return Callbacks(
            on_loading=lambda report: self._say("loading", report.as_json()),
            on_ready=lambda info: self._say("ready", dict(info)),
            on_beat=self._beat,
            on_news=lambda news: self._say("news", dict(news)),
            on_log=self._log,
            on_exit=self._end,
        )

    def _say(self, kind: str, value: Any) -> None:
        self._outbox.say(kind, value)
        self._wake()

    def _beat(self) -> None:
        self._outbox.beat()
        self._wake()

    def _log(self, line: str) -> None:
        self._outbox.log(line)
        self._wake()

    def _end(self, status: int) -> None:
        self._outbox.end(status)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def _renew(self) -> None:
        """Renew the lease, as the worker is still wanted."""
        from tandem.process.silence import SilenceWatch

        now = asyncio.get_running_loop().time()
        if self._lease is None:
            self._lease = SilenceWatch(silence_s=self._lease_s, period_s=self._lease_s / _LOOKS, now_s=now)
            self._look_soon()
        self._lease.on_message(now)

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._lease_s / _LOOKS, self._look_now)

    def _look_now(self) -> None:
        """Check the lease; time in which this process itself was suspended does not count."""
        if self._lease is not None and self._lease.is_silent(asyncio.get_running_loop().time()):
            os._exit(1)  # the child ends with this process; no one is left to report to
        self._look_soon()


def _on_this_node(config: str) -> str:
    """Return the configuration with the model's directory on this node, downloaded first for a hub id."""
    import yaml

    from cluster.processes.effective_config import resolve_model
    from tandem.config.cluster import ClusterConfig, dump_for_processes
    from tandem.config.cluster_tls import ClusterSection
    from tandem.config.worker import cluster_tls

    read = ClusterConfig.model_validate(yaml.safe_load(config))
    section = ClusterSection(tls=cluster_tls(read, has_parent=True))
    return dump_for_processes(resolve_model(read.model_copy(update={"cluster": section})))


def _command(plan: "ProcessPlan", config_path: Path, ready_fd: int) -> list[str]:
    from cluster.processes.effective_config import module_command

    return module_command(plan, config_path, ready_fd)


def _environment() -> Mapping[str, str]:
    """Return the worker's environment without Ray's: its token gives access to the whole Ray cluster."""
    from cluster.processes.effective_config import child_environment

    return {name: value for name, value in child_environment(os.environ).items() if not name.startswith("RAY_")}
