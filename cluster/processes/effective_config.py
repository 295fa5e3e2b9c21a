"""Resolves the user's configuration to the effective one that this machine's processes run with.

Everything left open is decided here, once: the workers' loopback addresses, router ports given as 0, the cluster's
secret, the directory of a model named by its hub id. The result is written as YAML that only the user can read.
"""

import contextlib
import os
import re
import secrets
import socket
import sys
import sysconfig
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from cluster.authority import create_member_bundle
from cluster.hub import download
from cluster.supervisor.supervisor import ProcessPlan, Role
from engine.model.config import load_model_config
from engine.model.dtype import resolve_dtype
from router.api.request.generation_defaults import load_generation_defaults
from tandem.config.cluster import ClusterConfig, RouterConfig, dump_for_processes
from tandem.config.cluster_tls import link_security, needs_certificates
from tandem.config.engine import EngineSection, ModelSection
from tandem.config.pools import PoolConfig
from tandem.config.source.environment import ENV_PREFIX
from tandem.config.worker import check_adapters, peer_hosts
from tandem.errors import ConfigError
from tandem.model_files import GGUF_SUFFIX, check_gguf_file, is_gguf_file
from tandem.model_path import BUILTIN, default_name, is_local_model, model_directory
from tandem.rpc.hosts import hold, join, split

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>[\w-][\w./-]*\.gguf))?")
"""A hub id, perhaps with a GGUF file of it: such models have one for each kind of quantization."""
NEEDED_FILES = ("config.json", "tokenizer.json")
"""Files without which no model directory can be served."""
ROUTER_NAME = "router"
GRPC_WITHOUT_FORK = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Environment of our child processes.

They fork only to start other programs. gRPC's fork handlers, enabled when it is imported, would warn about each fork of
a process with threads, and would end some children before they start.
"""
STOP_MARGIN_S = 5.0
"""Extra time for a process that drains to its own bound to close what it opened."""

_FIRST_PORT = 10_240
_MAX_DRAWS = 64
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's default


class PortDrawer:
    """Draws free ports; holds each one until it is left, so that none is drawn twice."""

    def __init__(self, reserved: Container[int] = ()) -> None:
        """`reserved`: not to be drawn."""
        self._reserved = reserved
        self._held: list[socket.socket] = []

    def __enter__(self) -> "PortDrawer":
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def draw(self, host: str, what: str) -> int:
        """Choose a free port. Raises ConfigError when the host is not of this machine.

        From below the range that the kernel takes outgoing connections' ports from: between this moment and the
        process's own bind, one of those could otherwise take it.
        """
        for _ in range(_MAX_DRAWS):
            port = _FIRST_PORT + secrets.randbelow(max(1, _first_ephemeral_port() - _FIRST_PORT))
            if port in self._reserved:
                continue
            with contextlib.suppress(ConfigError):
                return self.claim(host, port, what)
        return int(self._bind(host, 0, what).getsockname()[1])

    def claim(self, host: str, port: int, what: str) -> int:
        """Hold this port (0: any). Raises ConfigError, naming the setting, when it is taken."""
        return int(self._bind(host, port, what).getsockname()[1]) if port else self.draw(host, what)

    def _bind(self, host: str, port: int, what: str) -> socket.socket:
        try:
            held = hold(host, port)
        except OSError as error:
            raise ConfigError(f"{what}: {error}") from None
        self._held.append(held)
        return held


def make_effective(config: ClusterConfig) -> ClusterConfig:
    """Fill in every address, port, the secret, certificates, and what `auto` stands for.

    Raises ConfigError when a port is taken, a count contradicts, or the model here cannot be read.
    """
    with PortDrawer() as ports:
        # First, so that none of these is drawn for another.
        _claim_stated_ports(config.prefill, "prefill", ports)
        _claim_stated_ports(config.decode, "decode", ports)
        settled = config.model_copy(
            update={
                "model": _with_dtype(config.model),
                "engine": _with_quantization(config.engine, config.model),
                "router": _with_ports(config.router, ports),
                "prefill": _with_addresses(config.prefill, "prefill", ports),
                "decode": _with_addresses(config.decode, "decode", ports),
                "secret": config.secret or SecretStr(secrets.token_urlsafe(32)),
            }
        )
    return with_certificates(settled, peer_hosts(settled))


def with_certificates(config: ClusterConfig, hosts: Sequence[str]) -> ClusterConfig:
    """Make certificates for a cluster whose workers listen at `hosts`, if it needs any that the user does not name.

    Raises ConfigError when they are missing and cannot be made.
    """
    tls = config.cluster.tls
    if needs_certificates(tls, hosts):
        tls = tls.model_copy(update={"pem": SecretStr(create_member_bundle())})
    link_security(tls, hosts)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"tls": tls})})


def _with_dtype(model: ModelSection) -> ModelSection:
    """Resolve dtype `auto` once for all workers; those of the previous version do not know `auto`."""
    if not is_local_model(model.path):
        return model  # each worker resolves it itself
    return model.model_copy(update={"dtype": resolve_dtype(model.dtype, model.path)})


def _with_quantization(engine: EngineSection, model: ModelSection) -> EngineSection:
    """Resolve quantization `auto` for a model of float weights; workers of the previous version do not know `auto`."""
    if engine.quantization != "auto" or not is_local_model(model.path):
        return engine
    if load_model_config(model_directory(model.path)).weight_format is not None:
        return engine
    return engine.model_copy(update={"quantization": "none"})


def with_router_ports(config: ClusterConfig) -> ClusterConfig:
    """Fill in the servers' ports alone, on a host that may have no workers. Raises ConfigError when one is taken."""
    with PortDrawer() as ports:
        return config.model_copy(update={"router": _with_ports(config.router, ports)})


def _with_ports(router: RouterConfig, ports: PortDrawer) -> RouterConfig:
    http = ports.claim(router.host, router.port, "router.port")
    grpc = ports.claim(router.host, router.grpc_port, "router.grpc_port")
    return router.model_copy(update={"port": http, "grpc_port": grpc})


def _claim_stated_ports(pool: PoolConfig, name: str, ports: PortDrawer) -> None:
    """Hold where workers listen for their ranks on other nodes, and where they serve their health."""
    hosts = [split(address)[0] for address in pool.addresses] or [pool.host] * pool.replicas
    for index, host in enumerate(hosts):
        if pool.nodes > 1:
            ports.claim(host, pool.rank_port + index, f"{name}.rank_port")
        if pool.health_port is not None:
            ports.claim(host, pool.health_port + index, f"{name}.health_port")


def stated_ports(config: ClusterConfig) -> frozenset[int]:
    """Ports that workers listen at besides their addresses, now or after one more was started."""
    return frozenset(
        first + index
        for pool in (config.prefill, config.decode)
        for first in ([pool.rank_port] if pool.nodes > 1 else []) + ([pool.health_port] if pool.health_port else [])
        for index in range(pool.replicas + 1)
    )


def _with_addresses(pool: PoolConfig, name: str, ports: PortDrawer) -> PoolConfig:
    if not pool.addresses:
        drawn = tuple(join(pool.host, ports.draw(pool.host, f"{name}.host")) for _ in range(pool.replicas))
        return pool.model_copy(update={"addresses": drawn})
    if len(pool.addresses) != pool.replicas:
        raise ConfigError(f"{name}.addresses has {len(pool.addresses)} entries, but {name}.replicas is {pool.replicas}")
    for address in pool.addresses:
        ports.claim(*split(address), f"{name}.addresses")
    return pool


def with_addresses(config: ClusterConfig, *, prefill: tuple[str, ...], decode: tuple[str, ...]) -> ClusterConfig:
    """Set the workers that routers know from now on."""
    pools = {"prefill": (config.prefill, prefill), "decode": (config.decode, decode)}
    update = {name: pool.model_copy(update={"addresses": found}) for name, (pool, found) in pools.items()}
    return config.model_copy(update=update)


def with_sizes(config: ClusterConfig, sizes: Mapping[str, int]) -> ClusterConfig:
    """Set the number of workers in each pool named."""
    pools = {"prefill": config.prefill, "decode": config.decode}
    update = {name: pools[name].model_copy(update={"replicas": size}) for name, size in sizes.items()}
    return config.model_copy(update=update)


def with_live_settings(config: ClusterConfig, fresh: ClusterConfig) -> ClusterConfig:
    """Apply the settings of `fresh` that SIGHUP has running processes read again: logging and trace sampling."""
    telemetry = config.telemetry.model_copy(update={"sample_ratio": fresh.telemetry.sample_ratio})
    logs = {"log_level": fresh.log_level, "log_format": fresh.log_format}
    return config.model_copy(update={**logs, "telemetry": telemetry})


def plan_processes(config: ClusterConfig) -> list[ProcessPlan]:
    """Plan the processes of this cluster, workers first."""
    pools = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
    workers = [
        plan_worker(config, role, i, pool.addresses[i] if pool.addresses else "")
        for role, pool in pools
        for i in range(pool.replicas)
    ]
    return [*workers, *plan_routers(config)]


def plan_worker(config: ClusterConfig, role: Role, index: int, address: str) -> ProcessPlan:
    """Plan one worker of a pool."""
    pool = config.prefill if role is Role.PREFILL else config.decode
    return ProcessPlan(
        name=f"{role.value}-{index}",
        role=role,
        index=index,
        address=address,
        drain_s=pool.drain_s + STOP_MARGIN_S,
        join_s=pool.join_s if pool.nodes > 1 else 0.0,
    )


def plan_routers(config: ClusterConfig) -> list[ProcessPlan]:
    """Plan the router processes that serve this host's ports."""
    return [plan_router(config, index) for index in range(config.router.processes)]


def plan_router(config: ClusterConfig, index: int) -> ProcessPlan:
    """Plan one router process among those that share the ports."""
    count = config.router.processes
    return ProcessPlan(
        name=ROUTER_NAME if count == 1 and index == 0 else f"{ROUTER_NAME}-{index}",
        role=Role.ROUTER,
        index=index,
        count=count,
        drain_s=config.decode.drain_s + STOP_MARGIN_S,
        beats=count > 1,
    )


def module_command(plan: ProcessPlan, config_path: Path, ready_fd: int) -> list[str]:
    """Return the command line of this plan's process: `python -m MODULE --config FILE …`."""
    return [*module_prefix(plan.role), *place_arguments(plan, config_path), "--ready-fd", str(ready_fd)]


def place_arguments(plan: ProcessPlan, config_path: Path) -> list[str]:
    """Return the arguments that state a process's place in the cluster."""
    arguments = ["--config", str(config_path), "--index", str(plan.index)]
    if plan.role is Role.ROUTER:
        # Also for a single router process: its replacement shares the ports with it for a while.
        return [*arguments, "--siblings", str(config_path.parent)]
    return [*arguments, "--address", plan.address] if plan.address else arguments


def module_prefix(role: Role) -> list[str]:
    """Return the interpreter and module of a role."""
    module = "router" if role is Role.ROUTER else f"{role.value}_worker"
    return [sys.executable, "-m", module]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process.

    `TANDEM_*` is left out: the effective file already contains it, where the command line took precedence. A checkout
    that is not installed is put on the path, so that children run this code from any directory.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}
    if root := import_root():
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH", ""))))
    return {**GRPC_WITHOUT_FORK, **kept, "PYTHONUNBUFFERED": "1"}


def import_root() -> str | None:
    """Return the checkout to put on a process's path; None when Tandem is installed where Python looks anyway."""
    root = str(Path(__file__).resolve().parents[2])
    return None if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else root


@contextlib.contextmanager
def written(config: ClusterConfig, directory: Path) -> Iterator[Path]:
    """Write the configuration to a file that only its owner can read, and remove it in the end."""
    path = directory / "cluster.yaml"
    _write_privately(path, dump_for_processes(config))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def rewrite(config: ClusterConfig, path: Path) -> None:
    """Replace the file's configuration atomically: a reader finds the old or the new one, whole."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    _write_privately(fresh, dump_for_processes(config))
    fresh.replace(path)


def _write_privately(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def resolve_model(config: ClusterConfig, *, runs_workers: bool = True) -> ClusterConfig:
    """Resolve a hub id to a directory, or to a GGUF file (downloaded once, with a progress bar), or a path to an
    absolute one.

    Raises ConfigError when the model is none of these, when workers are to run a model that they do not support, or for
    an adapter that they would refuse.
    """
    check_adapters(config)
    path = config.model.path
    if path == BUILTIN:
        return config
    if is_local_model(path):
        model = Path(path).absolute()
        # Workers check everything; this much is checked before any process is started.
        if model.is_dir() and (lacking := [name for name in NEEDED_FILES if not (model / name).is_file()]):
            hint = " (name a GGUF file itself, to have them made of it)" if any(model.glob(f"*{GGUF_SUFFIX}")) else ""
            raise ConfigError(f"model.path: {model} has no {' and no '.join(lacking)}{hint}")
        _check_model(model, config.model, runs_workers)
        return _with_model(config, str(model), config.model.name or default_name(path))
    hub_id, file = parse_hub_id(path)
    model = Path(download(path)) if file is None else _hub_file(hub_id, file)
    _check_model(model, config.model, runs_workers)
    return _with_model(config, str(model), config.model.name or default_name(path))


def parse_hub_id(path: str) -> tuple[str, str | None]:
    """Split a model of the hub into its id and the file that it names, if any. Raises ConfigError for other paths."""
    if (named := _HUB_ID.fullmatch(path)) is None or ".." in path.split("/"):
        raise ConfigError(
            f"model.path: {path} is neither a directory, nor a {GGUF_SUFFIX} file, nor a hub id such as Qwen/Qwen3-0.6B"
        )
    return named["id"], named["file"]


def _hub_file(hub_id: str, name: str) -> Path:
    file = Path(download(hub_id, [name])) / name
    if not file.is_file():  # the hub's client downloads nothing, without an error, where nothing has this name
        raise ConfigError(f"model.path: {hub_id} has no file {name}")
    return file


def _check_model(directory: Path, model: ModelSection, runs_workers: bool) -> None:
    """Check the model here: every process would fail on its own minutes later, without naming the directory."""
    try:
        if is_gguf_file(directory):
            check_gguf_file(directory)
        if runs_workers:
            load_model_config(directory)
        if model.generation_config == "auto":
            load_generation_defaults(directory)
    except ConfigError as error:
        raise ConfigError(f"model.path: {directory} cannot be served: {error}") from None


def _with_model(config: ClusterConfig, path: str, name: str) -> ClusterConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path, "name": name})})
