"""One pool of workers in the cluster's configuration."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.config.access import Host
from tandem.config.section import Seconds, Section
from tandem.rpc.hosts import is_loopback, split

Port = Annotated[int, Field(ge=0, le=65535)]
BlockSize = Literal[16, 32, 64]
CacheDtype = Literal["auto", "int8", "fp8_e4m3", "int4"]
Quantization = Literal["auto", "stored", "none", "int8", "int4", "fp8", "nf4"]
MAX_REPLICAS = 256
"""Maximum number of workers of one pool that one machine may start."""
MAX_TENSOR_PARALLEL = 64
MAX_GPUS = 64
"""Maximum number of GPUs of one host."""


def _gpus(value: Any) -> Any:
    """Check `gpus`, with one message for all mistakes. Raises ValueError."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_GPUS):
        return value
    indices = list(value) if isinstance(value, (list, tuple)) else []
    good = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < MAX_GPUS for one in indices)
    if not indices or not good or len(set(indices)) < len(indices):
        raise ValueError(
            f"must be a list of different indices of GPUs, 0 to {MAX_GPUS - 1}, or how many (1 to {MAX_GPUS})"
        )
    return tuple(indices)


class PoolConfig(Section):
    """One pool of workers."""

    replicas: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    """Number of workers. Only the prefill pool may have 0; decode workers then prefill themselves."""
    host: Host = "127.0.0.1"
    """Address that a worker of this pool listens on."""
    port: Port = 0
    """Port that each worker listens on, each on its own `host`, when there are no `addresses`. Routers then discover
    workers through Redis, as in Kubernetes, where addresses are not known in advance."""
    addresses: tuple[str, ...] = ()
    """host:port of each worker. `tandem up` fills it in; state it when you start workers yourself."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_TENSOR_PARALLEL)
    """Number of ranks that share the model of one worker; each is a process, with its own GPU where there are GPUs."""
    gpus: Annotated[tuple[int, ...] | int | None, BeforeValidator(_gpus)] = None
    """GPUs of a host that this pool's workers get in turn: a list of indices, or how many. null: all that the other
    pool does not claim. Numbered as in `CUDA_VISIBLE_DEVICES`, else in bus order, from 0. Workers that share a GPU
    divide 80 % of its memory evenly, unless `engine.memory_bytes` is set."""
    nodes: int = Field(default=1, ge=1, le=MAX_TENSOR_PARALLEL)
    """Number of machines that the ranks of one worker are spread over evenly; it must divide `tensor_parallel_size`.
    The worker runs on the first machine, `tandem follower` on each other one. More than one machine needs
    `cluster.tls` or `transfer.tls`, and `transfer.isolated_network`."""
    health_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port, on the worker's own host, of a server in the clear with nothing but `grpc.health.v1`: the kubelet speaks no
    TLS, so with `cluster.tls` it cannot ask at the worker's own port. Workers with stated `addresses`, and those of
    `tandem up`, add their index to it. null: none."""
    rank_port: Port = 0
    """With several `nodes`: port on the worker's own host for its ranks on the other nodes. Workers with stated
    `addresses`, which may share a machine, add their index to it."""
    join_s: Seconds = 600.0
    """With several `nodes`: how long a worker waits for its ranks on the other nodes before it exits."""
    rack: str = Field(default="", max_length=63)
    """Rack or zone of the pool's workers, within which the network is fast; where workers differ, set it for each
    process, as with `TANDEM_DECODE__RACK`. Until links are measured, placement expects
    hand-offs between workers of one rack to be faster. Empty: unknown."""
    drain_s: Seconds = 30.0
    """Maximum time to finish outstanding work after SIGTERM."""
    block_size: BlockSize | None = None
    """Overrides `engine.block_size` for this pool."""
    kv_dtype: CacheDtype | None = None
    """Overrides `engine.kv_dtype` for this pool. KV is converted between the model's data type and a quantized one
    during the hand-off, in either direction, but not between two quantized ones."""
    quantization: Quantization | None = None
    """Overrides `engine.quantization` for this pool. Where pools differ, a text depends on which computed the KV
    that it goes on from: its own earlier steps, another answer's cached blocks, a prompt after a failover."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one worker on one machine."""
        return self.tensor_parallel_size // self.nodes


def has_own_host(pool: PoolConfig) -> bool:
    """Whether each worker of the pool is alone on its machine, as in a pod."""
    return pool.port != 0 and not pool.addresses


def rank_port(pool: PoolConfig, index: int) -> int:
    """Where one worker of a pool of several nodes listens for its ranks on the others."""
    return pool.rank_port if has_own_host(pool) else pool.rank_port + index


def health_port(pool: PoolConfig, index: int) -> int | None:
    """Where one worker of a pool serves its health in the clear; None: nowhere."""
    if pool.health_port is None:
        return None
    return pool.health_port if has_own_host(pool) else pool.health_port + index


def listening_ports(pool: PoolConfig, name: str) -> Iterator[tuple[str, int, str]]:
    """Host, port and setting of everything that workers of the pool listen at by the configuration. Raises ValueError.

    Without `addresses` all workers are on the pool's host.
    """
    for index, (host, port) in enumerate([split(one) for one in pool.addresses] or [(pool.host, 0)] * pool.replicas):
        machine = "localhost" if is_loopback(host) else host
        if port:
            yield machine, port, f"{name}.addresses"
        if pool.nodes > 1:
            yield machine, rank_port(pool, index), f"{name}.rank_port"
        if (health := health_port(pool, index)) is not None:
            yield machine, health, f"{name}.health_port"


def health_ports_problem(pools: Mapping[str, PoolConfig]) -> str | None:
    """Why workers, by pool, that may share a machine cannot serve their health as the pools say; None: they can."""
    taken: dict[tuple[str, int], str] = {}
    for name, pool in pools.items():
        if has_own_host(pool):
            continue
        for machine, port, setting in listening_ports(pool, name):
            other = taken.setdefault((machine, port), setting)
            if other is not setting and "health_port" in f"{other} {setting}":
                return f"{setting}: port {port} of {machine} is one of {other}, too"
    return None


def health_port_problem(pool: PoolConfig) -> str | None:
    """Reason why the pool's workers cannot serve health as configured, beginning with the field; None when they can."""
    if pool.health_port is None:
        return None
    for name in ("port", "rank_port"):
        if pool.health_port == getattr(pool, name):
            return f"health_port is {pool.health_port}, the same as {name}"
    if pool.health_port + pool.replicas > 65536:
        return f"health_port is {pool.health_port}: one port for each of {pool.replicas} workers goes beyond 65535"
    return None


def nodes_problem(pool: PoolConfig) -> str | None:
    """Reason why the pool's workers cannot be spread over nodes as configured, beginning with the field, or None."""
    if pool.tensor_parallel_size % pool.nodes:
        return f"nodes must divide tensor_parallel_size ({pool.tensor_parallel_size}), got {pool.nodes}"
    if pool.nodes == 1:
        return None
    if pool.gpus is not None:
        return "gpus cannot be set with several nodes: a worker takes the first of CUDA_VISIBLE_DEVICES on each"
    if not pool.rank_port:
        return f"nodes is {pool.nodes}: rank_port must say where a worker listens for its ranks on other nodes"
    if pool.rank_port == pool.port:
        return f"rank_port is {pool.rank_port}, the same as port"
    if pool.rank_port + pool.replicas > 65536:
        return f"rank_port is {pool.rank_port}: one port for each of {pool.replicas} workers goes beyond 65535"
    return None


def context_problem(context: int | None, num_blocks: int | None, block_size: int) -> str | None:
    """Reason why a pool of `num_blocks` cannot hold the stated context; None when it can, or when either is unset."""
    if context is None or num_blocks is None or num_blocks * block_size >= context:
        return None
    return (
        f"engine.num_blocks is {num_blocks}, which with blocks of {block_size} is {num_blocks * block_size} tokens:"
        f" model.max_model_len is {context} and takes at least {-(-context // block_size)} blocks"
    )
