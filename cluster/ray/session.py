"""The connection of this process to a Ray cluster as a driver: joining, nodes, and one actor in its placement group.

Ray itself waits half a minute or more for a head that is missing or rejects its token, and then reports neither. So the
head is queried first.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeVar

from cluster.ray.host import WorkerHost
from cluster.supervisor.ray_placement import CPU, GPU, MEMORY, STRATEGY, Node
from tandem.errors import ConfigError

T = TypeVar("T")


@asynccontextmanager
async def held(make: Callable[[], T], end: Callable[[T], None], *, end_s: float) -> AsyncIterator[T]:
    """Hold what `make` returns until `end`, each run in a thread; wait at most `end_s` for the end, which then
    continues.

    If the caller is cancelled during `make`, its result is passed to `end` as soon as it exists.
    """
    loop = asyncio.get_running_loop()
    making = loop.run_in_executor(None, make)

    def end_at_once(made: asyncio.Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            with suppress(
                RuntimeError
            ):  # the loop starts no more threads: the process is ending, and everything it holds with it
                loop.run_in_executor(None, end, made.result())

    try:
        thing = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(end_at_once)
        raise
    try:
        yield thing
    finally:
        ending = loop.run_in_executor(None, end, thing)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), end_s)


LOCAL, AUTO = "local", "auto"
_CLIENT_SCHEME = "ray://"
_MIN_VERSION = (2, 52)
_ASK_S = 5.0
"""Timeout of the head's answer."""
_END_S = 5.0
"""Maximum wait for the head to end an actor or return a placement group, before continuing without it."""
_AUTH_MODE = "RAY_AUTH_MODE"
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_TOKEN_HINT = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"  # noqa: S105  # names of places, no secret


class NodeLost(Exception):
    """An actor or its node is gone or no longer answers."""


class HostHandle:
    """Handle of an actor (`cluster.ray.host`). Every call raises NodeLost if the actor cannot answer."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def where(self) -> tuple[str, str]:
        """Return the id and address of its node."""
        node_id, host = await self._call("where")
        return node_id, host

    async def start(self, role: str, index: int, address: str, config: str) -> int:
        """Start the worker; also raises ConfigError or OSError."""
        return int(await self._call("start", role, index, address, config))

    async def configure(self, config: str) -> None:
        """Replace the configuration that its worker reads."""
        await self._call("configure", config)

    async def listen(self) -> list[tuple[str, Any]]:
        words: list[tuple[str, Any]] = await self._call("listen")
        return words

    async def send(self, signum: int) -> None:
        await self._call("send", signum)

    async def _call(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:  # raised by the actor itself
            cause = getattr(error, "cause", None)
            if isinstance(cause, (ConfigError, OSError)):
                raise cause from None
            raise NodeLost(_last_line(error)) from None
        except RayError as error:
            raise NodeLost(_reason(error)) from None


class RaySession:
    """Connection to a Ray cluster. `with connect(address) as session:`; leaving it ends every actor of ours."""

    def __init__(self, address: str, *, warning: str | None) -> None:
        self.address = address
        self.warning = warning
        """Warning for the user about access to this cluster, or None."""
        self._num_placed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    async def nodes(self) -> list[Node]:
        """List the nodes that are alive. Raises NodeLost if the head does not answer."""
        from ray.exceptions import RayError

        try:
            return await asyncio.to_thread(_nodes)
        except RayError as error:
            raise NodeLost(_last_line(error)) from None

    @asynccontextmanager
    async def host(
        self, what: str, bundle: Mapping[str, float], near: Node | None, lease_s: float
    ) -> AsyncIterator[HostHandle]:
        """Hold an actor in a placement group of its own; both are removed in the end. Waits until a node has room.

        `near`: the preferred node; Ray takes another if that one is gone or full by then.
        """
        from ray.exceptions import RayError

        self._num_placed += 1
        name = f"tandem {what} #{self._num_placed}"
        try:
            async with held(lambda: _reserved(name, bundle, near), _give_back, end_s=_END_S) as group:
                await (await asyncio.to_thread(group.ready))
                async with held(lambda: _actor(group, bundle, lease_s), _dismiss, end_s=_END_S) as actor:
                    yield HostHandle(actor)
        except RayError as error:
            raise NodeLost(_last_line(error)) from None


def _reserved(name: str, bundle: Mapping[str, float], near: Node | None) -> Any:
    from ray.util.placement_group import placement_group

    near_id = None if near is None else near.node_id
    return placement_group([dict(bundle)], strategy=STRATEGY, name=name, _soft_target_node_id=near_id)


def _actor(group: Any, bundle: Mapping[str, float], lease_s: float) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host = ray.remote(WorkerHost).options(
        num_cpus=bundle[CPU],
        num_gpus=bundle.get(GPU, 0),
        memory=bundle.get(MEMORY),
        resources={name: amount for name, amount in bundle.items() if name not in (CPU, GPU, MEMORY)},
        max_restarts=0,  # restarts are the supervisor's decision
        max_concurrency=8,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
    )
    return host.remote(lease_s)


def _dismiss(actor: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError, RuntimeError, ValueError):  # it or Ray has ended
        ray.kill(actor)


def _give_back(group: Any) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    with suppress(ray.exceptions.RayError, RuntimeError, ValueError):  # it or Ray is gone
        remove_placement_group(group)


def connect(address: str, environment: MutableMapping[str, str] = os.environ) -> RaySession:
    """Join a Ray cluster, or start one here (`local`). Raises ConfigError at once if that is impossible.

    Call this on the main thread, before signal handlers are installed: Ray handles SIGTERM until someone else does.
    """
    if address.startswith(_CLIENT_SCHEME):
        raise ConfigError(
            "ray.address: ray:// is for interactive clients; run `tandem up` on a node of the Ray cluster"
        )
    # Set before Ray is imported, which reads it. An unset variable does not mean that the user decided against it.
    mode = environment.setdefault(_AUTH_MODE, "token")
    ray = _module()
    if address != LOCAL:
        address = _head_of(address)
        _ask(ray, address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **_own_cluster(address))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"ray.address: {_last_line(error)}") from None
    warning = None
    if mode != "token":
        warning = (
            f"{_AUTH_MODE} is {mode}: anyone who can reach the Ray cluster can run code on it and read its secrets"
        )
    return RaySession(address, warning=warning)


def _module() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs the `ray` extra: pip install 'tandem-serve[ray]'") from None
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise ConfigError(f"--ray needs Ray {needed} or newer, which supports tokens; found {ray.__version__}")
    return ray


def _own_cluster(address: str) -> dict[str, Any]:
    """Return the settings of a cluster that is started here; one that runs has its own."""
    return {"include_dashboard": False} if address == LOCAL else {}


def _head_of(address: str) -> str:
    """Return the host:port of the head."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return str(canonicalize_bootstrap_address_or_die(address))
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"ray.address: {_last_line(error)}") from None


def _ask(ray: Any, address: str) -> None:
    """Check that there is a head and that it accepts our token. Raises ConfigError."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # the head uses its own certificates; Ray will report problems
    try:
        headers = ray._raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise ConfigError(f"no Ray token: {_last_line(error)}; looked in {_TOKEN_HINT}") from None
    if os.environ[_AUTH_MODE] == "token" and not headers:
        raise ConfigError(f"no Ray token: looked in {_TOKEN_HINT}")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_CLUSTER_ID, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=_ASK_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            raise ConfigError(_refusal(address, error.code().name, error.details())) from None


def _refusal(address: str, code: str, details: str | None) -> str:
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return f"the Ray cluster at {address} rejected the token from {_TOKEN_HINT}"
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return f"ray.address: no Ray head answers at {address}"
    return f"ray.address: the Ray head at {address} answers {code}: {details}"


def _nodes() -> list[Node]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(
            node_id=info["NodeID"],
            host=info["NodeManagerAddress"],
            total=dict(info["Resources"]),
            free=dict(free.get(info["NodeID"], {})),
        )
        for info in ray.nodes()
        if info["Alive"]
    ]


def _last_line(error: BaseException) -> str:
    """Return the last line: Ray's messages are long, and the end of a traceback says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _reason(error: BaseException) -> str:
    """Extract the sentence that says why an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = [line for line in lines if "died because" in line or "node was" in line or "Error" in line]
    return " ".join(why[:2]) or (lines[0] if lines else type(error).__name__)
