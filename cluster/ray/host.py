"""An actor for one worker: on its node it starts the worker's real main, tells of it, and signals it.

The process is a child of the actor's (`cluster.processes.child`): the kernel kills it when the actor's process ends,
and Ray ends that with `tandem up` and with the node. Should Ray not come to it, an actor that nobody has asked
anything for `lease_s` ends by itself. The configuration, secrets included, comes with a call from `tandem up` straight
to the actor, never with its constructor, which Ray keeps; here it is in memory alone, where only this user's processes
can read it.

Nothing here runs in `tandem up`, and nothing but `where` needs Ray.
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
    from router.workers.silence import SilenceWatch

Word = tuple[str, Any]
"""What happened, and what is to be said of it: loading, ready, beat, news, log or exit."""
LISTEN_S = 1.0
"""An actor that has nothing to tell answers so soon nevertheless: it is a sign of life."""
_LOOKS = 8
"""So often within its lease it is looked whether it has run out."""
MAX_LOG_BYTES = 1 << 18
"""Of lines that nobody has fetched yet; the oldest are lost first, and it is told how many."""


class Outbox:
    """What is to be told. Pure; log lines are bounded, all else is little and is kept."""

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
        """A line of the process."""
        self._lines.append(line)
        self._log_bytes += len(line)
        while self._log_bytes > self._max_log_bytes and len(self._lines) > 1:
            self._log_bytes -= len(self._lines.popleft())
            self._lost += 1

    def beat(self) -> None:
        """It lives; however often, it is told once."""
        self._is_beating = True

    def say(self, kind: str, value: Any) -> None:
        """Anything else but its end."""
        self._words.append((kind, value))

    def end(self, status: int) -> None:
        """Its end, told last of all."""
        self._status = status

    def drain(self) -> list[Word]:
        """Everything, in order; lines first, since a process speaks before it ends."""
        lost = [("log", f"{self._lost} lines were lost: nobody fetched them in time")] if self._lost else []
        words: list[Word] = [*lost, *(("log", line) for line in self._lines), *self._words]
        words += [("beat", None)] if self._is_beating else []
        words += [] if self._status is None else [("exit", self._status)]
        self._lines.clear()
        self._words = []
        self._log_bytes = self._lost = 0
        self._is_beating, self._status = False, None
        return words


class WorkerHost:
    """The actor. Its methods are called by `cluster.ray.launcher` alone, with plain values."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._outbox = Outbox()
        self._news: asyncio.Event | None = None
        self._config_fd: int | None = None
        self._child: Child | None = None
        self._lease: SilenceWatch | None = None
        self._look: asyncio.TimerHandle | None = None

    async def where(self) -> tuple[str, str]:
        """The id and the address of the node that this is."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    async def start(self, role: str, index: int, address: str, config: str) -> int:
        """Start the worker; its pid. Raises ConfigError or OSError."""
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
        """What the worker reads when it starts, and again upon SIGHUP."""
        assert self._config_fd is not None  # noqa: S101  # narrows
        text = (await asyncio.to_thread(_on_this_node, config)).encode()
        os.ftruncate(self._config_fd, 0)
        os.pwrite(self._config_fd, text, 0)

    async def listen(self) -> list[Word]:
        """What has happened since it was last asked, as soon as there is something."""
        assert self._news is not None  # noqa: S101  # narrows
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
        """Somebody still wants this worker."""
        from router.workers.silence import SilenceWatch

        now = asyncio.get_running_loop().time()
        if self._lease is None:
            self._lease = SilenceWatch(silence_s=self._lease_s, period_s=self._lease_s / _LOOKS, now_s=now)
            self._look_soon()
        self._lease.on_message(now)

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._lease_s / _LOOKS, self._look_now)

    def _look_now(self) -> None:
        """Time in which this process itself stood still, with its whole machine perhaps, does not count."""
        if self._lease is not None and self._lease.is_silent(asyncio.get_running_loop().time()):
            os._exit(1)  # the child goes with this process; nobody is left to be told
        self._look_soon()


def _on_this_node(config: str) -> str:
    """With the model's directory here, fetched first where a hub id was given."""
    import yaml

    from cluster.processes.effective_config import resolve_model
    from tandem.config.cluster import ClusterConfig, dump_for_processes

    return dump_for_processes(resolve_model(ClusterConfig.model_validate(yaml.safe_load(config))))


def _command(plan: "ProcessPlan", config_path: Path, ready_fd: int) -> list[str]:
    from cluster.processes.effective_config import module_command

    return module_command(plan, config_path, ready_fd)


def _environment() -> Mapping[str, str]:
    """Of a process of ours, without Ray's: its token opens the whole cluster, and a worker has no use for it."""
    from cluster.processes.effective_config import child_environment

    return {name: value for name, value in child_environment(os.environ).items() if not name.startswith("RAY_")}
