"""Settings that every process derives from the cluster's configuration, and the errors when they are missing."""

from collections import Counter
from pathlib import Path

from tandem.adapters.files import check_adapter
from tandem.config.cluster import ClusterConfig
from tandem.config.cluster_tls import ClusterTls
from tandem.config.pools import PoolConfig, has_own_host, health_port
from tandem.errors import ConfigError
from tandem.rpc.hosts import hold, is_loopback
from tandem.values.roles import WorkerRole


def cluster_secret(config: ClusterConfig) -> bytes:
    """The key of block names and of the cluster's gRPC. Raises ConfigError when there is none."""
    if config.secret is None:
        raise ConfigError("secret is not set: `tandem up` generates one; without it, set it in the YAML")
    return config.secret.get_secret_value().encode()


def cluster_tls(config: ClusterConfig, *, has_parent: bool) -> ClusterTls:
    """The TLS settings of a process. `has_parent`: `tandem up` started it, and wrote its configuration.

    A parent of the previous version writes no such section, and starts processes that know no TLS; these must be
    reachable.
    """
    is_older = has_parent and "cluster" not in config.model_fields_set
    return ClusterTls(mode="off") if is_older else config.cluster.tls


def num_ranks(config: ClusterConfig, pool: PoolConfig) -> int:
    """Number of processes that compute and may share this machine with a worker of `pool`, its own included.

    A worker with a host of its own shares it with no other; where addresses are stated all workers may be on one
    machine, except for the ranks on other nodes.
    """
    if has_own_host(pool):
        return pool.ranks_per_node
    return sum(pool.replicas * pool.ranks_per_node for pool in (config.prefill, config.decode))


def memory_here_bytes(config: ClusterConfig, pool: PoolConfig) -> int | None:
    """Sum of `engine.memory_bytes` of the workers on the machine of any worker of `pool`; None when it is not set.

    Workers whose stated addresses name the same host share a machine; which others do is unknown here. This is the
    lower bound, so that no worker that fits is refused.
    """
    if (memory_bytes := config.engine.memory_bytes) is None:
        return None
    if not pool.addresses:
        return memory_bytes // pool.nodes
    here: Counter[str] = Counter()
    for each in (config.prefill, config.decode):
        for address in each.addresses:
            here[_machine(address)] += memory_bytes // each.nodes
    if len(here) == 1:
        # While a pool grows its size is known before the addresses are.
        return sum(each.replicas * (memory_bytes // each.nodes) for each in (config.prefill, config.decode))
    return min(here[_machine(address)] for address in pool.addresses)


_ADAPTER_SHARE = 16
"""The part of a worker's memory that is for adapters by default: see `engine.adapter_bytes`."""


def max_adapter_bytes(config: ClusterConfig) -> int | None:
    """Size of an adapter's matrices in their file beyond which no worker can hold it; None where only workers know.

    All memory for adapters is full of its values then, which the file has in float32, each at one rank only.
    """
    num_bytes = config.engine.adapter_bytes
    if num_bytes is None:
        if config.engine.memory_bytes is None:
            return None
        num_bytes = config.engine.memory_bytes // _ADAPTER_SHARE
    # Where workers choose the dtype, the one of which most values fit.
    value_bytes = 4 if config.model.dtype == "float32" else 2
    return num_bytes // value_bytes * 4


def check_adapters(config: ClusterConfig) -> None:
    """Check the configured adapters as far as little of their files says. Raises ConfigError that names the setting."""
    for name, path in config.model.adapters.items():
        try:
            check_adapter(Path(path), max_rank=config.engine.max_adapter_rank, max_bytes=max_adapter_bytes(config))
        except ConfigError as error:
            raise ConfigError(f"model.adapters.{name}: {error}") from None


def _machine(address: str) -> str:
    host = address.rpartition(":")[0]
    return "localhost" if is_loopback(host.strip("[]")) else host


def listen_address(pool: PoolConfig, name: str, index: int) -> tuple[str, int]:
    """Host and port of one worker of the pool. Raises ConfigError naming the setting."""
    if has_own_host(pool):
        if pool.host in ("0.0.0.0", "::"):  # noqa: S104 - refused
            raise ConfigError(f"{name}.host: {pool.host} is not where a peer can reach this worker; name one address")
        return f"[{pool.host}]" if ":" in pool.host else pool.host, pool.port
    if not 0 <= index < len(pool.addresses):
        raise ConfigError(f"{name}.addresses names {len(pool.addresses)} workers, there is no index {index}")
    host, _, port = pool.addresses[index].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name}.addresses: {pool.addresses[index]!r} is not host:port")
    if host in ("0.0.0.0", "[::]", "::", "*"):  # noqa: S104 - refused
        raise ConfigError(f"{name}.addresses: {host} is not where a peer can reach this worker; name one address")
    return host, int(port)


def peer_hosts(config: ClusterConfig) -> list[str]:
    """Hosts of the workers in the configuration; those that register themselves are unknown here."""
    hosts: list[str] = []
    for pool in (config.prefill, config.decode):
        hosts += [pool.host] if has_own_host(pool) else [address.rpartition(":")[0] for address in pool.addresses]
    return hosts


def worker_host(config: ClusterConfig, role: WorkerRole, index: int) -> str:
    """Host of a worker on another machine. Raises ConfigError where each has its own, which the configuration does not
    state."""
    pool = config.prefill if role is WorkerRole.PREFILL else config.decode
    if has_own_host(pool):
        raise ConfigError(f"{role.value}.port: workers have hosts of their own; state this one's with --leader")
    return listen_address(pool, role.value, index)[0]


def free_address(pool: PoolConfig, name: str, index: int, *, stated: str | None = None) -> tuple[str, int]:
    """Check, before the model is loaded, that the worker's address and its health port are free.

    `stated`: the address from the parent process. Raises OSError when somebody listens there, too.
    """
    health = health_port(pool, index)
    if stated is not None:
        pool, index = pool.model_copy(update={"addresses": (stated,)}), 0
    host, port = listen_address(pool, name, index)
    hold(host.strip("[]"), port).close()
    if health is not None:
        try:
            hold(host.strip("[]"), health).close()
        except OSError as error:
            raise OSError(f"{name}.health_port: {error}") from None
    return host, port


def disk_folder(config: ClusterConfig, role: str) -> Path | None:
    """Folder for the blocks of one role's workers, since the roles may split the model differently; None without a
    path."""
    path = config.engine.disk_cache_path
    return None if path is None else Path(path).expanduser() / role
