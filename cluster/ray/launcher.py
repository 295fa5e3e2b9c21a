"""The launcher of `tandem up --ray`: workers run as processes on the nodes of a Ray cluster, routers on this machine.

It passes facts between the actors (`cluster.ray.host`), the pure `cluster.supervisor.ray_placement` and the callbacks
that a local process would call (`cluster.processes.child`). A worker whose node is lost has ended like any other, and
is placed again when the supervisor restarts it. A worker's address is known once it serves.
"""

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from cluster.processes.child import Callbacks
from cluster.processes.effective_config import with_certificates, with_router_ports
from cluster.processes.launcher import EXIT_NOT_STARTED, Launched, LocalLauncher
from cluster.ray.session import HostHandle, NodeLost, RaySession, connect
from cluster.supervisor.ray_placement import GPU, Node, RayPlacement, bundle_of, render_resources, worker_config
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import ClusterConfig, dump_for_processes
from tandem.errors import ConfigError
from tandem.model_path import is_local_model
from tandem.process.load_progress import LoadReport
from tandem.process.silence import SilenceWatch
from tandem.rpc.hosts import join

SOMEWHERE = "a Ray node"
"""Host of workers whose node is not known yet: not on loopback."""
LEASE_S = 60.0
"""Time without a call from `tandem up` after which an actor ends, and its worker with it."""
_ROOM_S = 5.0
"""Delay before the first report that a worker waits for room; doubled for each further one."""
_MAX_ROOM_S = 600.0
"""Maximum delay between two such reports."""
_LOOKS = 8
"""Number of checks for a silent actor within `ray.silence_s`."""


@contextmanager
def open_launcher(address: str, model_path: str, *, warn: Callable[[str], None]) -> Iterator["RayLauncher"]:
    """Join the Ray cluster at `address` until the end. Raises ConfigError before anything is started.

    Call this on the main thread, outside any event loop. `warn` is told what the user should know about that cluster.
    """
    with connect(address) as session:
        if session.warning is not None:
            warn(session.warning)
        # Nodes download a model of the hub; local files must exist there under the same name.
        yield RayLauncher(session, model_path=None if is_local_model(model_path) else model_path)


class RayLauncher:
    """Launcher for a Ray cluster. Use it on the thread that lives longest: routers are its children."""

    def __init__(self, session: RaySession, *, model_path: str | None = None) -> None:
        """`model_path`: where nodes find the model, if it differs from this machine; a hub id is downloaded there."""
        self._session = session
        self._model_path = model_path
        self._local = LocalLauncher()
        self.placement = RayPlacement()
        self.config = ClusterConfig()

    def settle(self, config: ClusterConfig) -> ClusterConfig:
        """Fill in the routers' ports, the secret and certificates; workers choose ports.

        Raises ConfigError for fixed addresses.
        """
        for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
            if pool.addresses:
                raise ConfigError(f"{name}.addresses: not possible with Ray, which chooses the workers' nodes")
        secret = config.secret or SecretStr(secrets.token_urlsafe(32))
        settled = with_router_ports(config).model_copy(update={"secret": secret})
        return with_certificates(settled, (SOMEWHERE,))

    @property
    def config_path(self) -> Path:
        return self._local.config_path

    def open(self, config: ClusterConfig) -> None:
        """Write the file that routers read."""
        self.config = config
        self._local.open(config)

    def configure(self, config: ClusterConfig) -> None:
        """Replace the routers' configuration now; a worker gets it before its signal to reload."""
        self._local.configure(config)  # if writing fails, nothing changes
        self.config = config

    def address(self, config: ClusterConfig, role: Role) -> str:
        """Return an empty address: it is known when the worker serves."""
        return ""

    def replace(self, name: str, retired: str) -> None:
        """Do nothing: Ray chooses the node."""

    def start(self, plan: ProcessPlan, callbacks: Callbacks) -> Launched:
        """Start a router here, or a worker on some node as soon as there is room."""
        if plan.role is Role.ROUTER:
            return self._local.start(plan, callbacks)
        return RayProcess(self, self._session, plan, callbacks)

    def close(self) -> None:
        """Remove the files that were written."""
        self._local.close()

    def config_on(self, role: Role, node: Node) -> str:
        """Return the configuration for a worker on this node, as YAML."""
        return dump_for_processes(worker_config(self.config, role, node, self._model_path or self.config.model.path))


class RayProcess:
    """Handle of one worker, from the search for a node to its end."""

    def __init__(self, launcher: RayLauncher, session: RaySession, plan: ProcessPlan, callbacks: Callbacks) -> None:
        self._launcher = launcher
        self._session = session
        self._plan = plan
        self._callbacks = callbacks
        self._host: HostHandle | None = None
        self._node: Node | None = None
        self._is_started = self._has_ended = False
        self._orders: set[asyncio.Task[None]] = set()
        self.pid: int | None = None
        """Process id on its node."""
        self._life = asyncio.get_running_loop().create_task(self._live())
        # Not at the end of `_live`: a task that is cancelled before its first turn never starts.
        self._life.add_done_callback(self._ended)

    def send(self, signum: signal.Signals) -> None:
        """Signal the worker; one without a process has nothing to drain, so any signal ends it at once."""
        if self._has_ended:
            return
        if not self._is_started:
            if signum is not signal.SIGHUP:
                self._life.cancel()
            return
        order = asyncio.get_running_loop().create_task(self._signal(signum))
        self._orders.add(order)
        order.add_done_callback(self._orders.discard)

    async def _signal(self, signum: signal.Signals) -> None:
        assert self._host is not None and self._node is not None  # noqa: S101, PT018  # narrows: only a started worker is signalled
        with suppress(NodeLost, ConfigError, OSError):  # `_listen` reports the end of the worker
            if signum is signal.SIGHUP:
                await self._host.configure(self._launcher.config_on(self._plan.role, self._node))
            await asyncio.wait_for(self._host.send(signum), self._silence_s)
            return
        if signum is signal.SIGKILL:
            self._life.cancel()

    async def _live(self) -> int:
        """Run the worker to its end, and return the exit status."""
        try:
            return await self._run()
        except NodeLost as error:
            self._callbacks.on_log(f"lost together with its node: {error}")
            self._launcher.placement.lost(self._plan.name, asyncio.get_running_loop().time())
            return -signal.SIGKILL if self._is_started else EXIT_NOT_STARTED
        except (ConfigError, OSError) as error:
            self._callbacks.on_log(f"cannot start: {error}")
            return EXIT_NOT_STARTED

    def _ended(self, life: asyncio.Task[int]) -> None:
        """Report the worker's end, whatever its reason."""
        self._has_ended = True
        self._launcher.placement.leave(self._plan.name)
        if not life.cancelled() and (error := life.exception()) is not None:
            self._callbacks.on_log(f"lost because of a Ray error: {type(error).__name__}: {error}")
        is_told = not life.cancelled() and life.exception() is None
        self._callbacks.on_exit(life.result() if is_told else -signal.SIGKILL)

    async def _run(self) -> int:
        role, launcher = self._plan.role, self._launcher
        nodes = await self._session.nodes()
        bundle = bundle_of(launcher.config, role, has_gpus=any(GPU in node.total for node in nodes))
        now = asyncio.get_running_loop().time()
        near = launcher.placement.choose(self._plan.name, role, bundle, nodes, now)
        self._callbacks.on_room(False)
        reporting = asyncio.get_running_loop().create_task(self._report_wait(bundle))
        try:
            async with self._session.host(self._plan.name, bundle, near, LEASE_S) as host:
                reporting.cancel()
                self._callbacks.on_room(True)
                node_id, address = await host.where()
                self._host, self._node = host, await self._node_of(node_id)
                launcher.placement.settle(self._plan.name, role, bundle, node_id)
                text = launcher.config_on(role, self._node)
                self.pid = await host.start(role.value, self._plan.index, join(address, 0), text)
                self._is_started = True
                return await self._listen(host)
        finally:
            reporting.cancel()

    async def _node_of(self, node_id: str) -> Node:
        found = [node for node in await self._session.nodes() if node.node_id == node_id]
        if not found:
            raise NodeLost("the node was lost before the worker started")
        return found[0]

    async def _listen(self, host: HostHandle) -> int:
        """Pass on the actor's events, and return the exit status."""
        loop, look_s = asyncio.get_running_loop(), self._silence_s / _LOOKS
        watch = SilenceWatch(silence_s=self._silence_s, period_s=look_s, now_s=loop.time())
        listening = loop.create_task(host.listen())
        try:
            while True:
                await asyncio.wait({listening}, timeout=look_s)
                is_silent = watch.is_silent(loop.time())
                if not listening.done():
                    if is_silent:
                        raise NodeLost(f"no answer for {self._silence_s:g} s")
                    continue
                watch.on_message(loop.time())
                for kind, value in listening.result():
                    if kind == "exit":
                        return int(value)
                    self._pass_on(kind, value)
                listening = loop.create_task(host.listen())
        finally:
            listening.cancel()

    def _pass_on(self, kind: str, value: Any) -> None:
        match kind:
            case "log":
                self._callbacks.on_log(value)
            case "beat":
                self._callbacks.on_beat()
            case "loading":
                self._callbacks.on_loading(LoadReport.read(value))
            case "ready":
                self._callbacks.on_ready(value)
            case "news":
                self._callbacks.on_news(value)

    async def _report_wait(self, bundle: Mapping[str, float]) -> None:
        """Report at growing intervals what the worker waits for and what the nodes have free."""
        wait_s = _ROOM_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_ROOM_S)
            with suppress(NodeLost):
                self._callbacks.on_log(_describe_wait(bundle, await self._session.nodes()))

    @property
    def _silence_s(self) -> float:
        return self._launcher.config.ray.silence_s


def _describe_wait(bundle: Mapping[str, float], nodes: list[Node]) -> str:
    room = "; ".join(
        f"{node.host} has {render_resources(_shown(node.free, bundle)) or 'none of these'}" for node in nodes
    )
    hopeless = "" if any(node.could_hold(bundle) for node in nodes) else ", and no node is that large"
    return f" WARNING waits for a Ray node with {render_resources(bundle)} free ({room}){hopeless}"


def _shown(free: Mapping[str, float], bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in free.items() if name in bundle}
