"""One pool of workers in the cluster's configuration."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.config.access import Host
from tandem.config.section import Seconds, Section

Port = Annotated[int, Field(ge=0, le=65535)]
BlockSize = Literal[16, 32, 64]
CacheDtype = Literal["auto", "int8", "fp8_e4m3"]
MAX_REPLICAS = 256
"""Workers of one pool that one machine is asked to start."""
MAX_TENSOR_PARALLEL = 64
MAX_GPUS = 64
"""Of one host."""


def _gpus(value: Any) -> Any:
    """One sentence for all that may be wrong."""
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
    """Workers of this pool; only the prefill pool may have 0: decode workers then compute prompts themselves."""
    host: Host = "127.0.0.1"
    """Where a worker of this pool listens."""
    port: Port = 0
    """Without `addresses`: at which port each worker listens, at a `host` of its own. Routers then hear of it from
    Redis; so it is where nobody knows addresses beforehand, as in Kubernetes."""
    addresses: tuple[str, ...] = ()
    """host:port of each worker; `tandem up` fills it in, a hand-made cluster states it."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_TENSOR_PARALLEL)
    """Ranks, each a process (on a GPU machine, with a GPU) of its own, that share the model of one worker."""
    gpus: Annotated[tuple[int, ...] | int | None, BeforeValidator(_gpus)] = None
    """Which GPUs of a host this pool's workers get in turn: a list of indices, or how many; null: all that the other
    pool does not claim. As `CUDA_VISIBLE_DEVICES` numbers them, else by their place on the bus, from 0. Workers that
    share one divide 80 % of its memory evenly, unless `engine.memory_bytes` is stated."""
    nodes: int = Field(default=1, ge=1, le=MAX_TENSOR_PARALLEL)
    """Machines over which the ranks of one worker are spread, as many on each: it divides `tensor_parallel_size`. The
    worker itself runs on the first; on each other one runs `tandem follower`. Beyond one machine that needs
    `transfer.tls` and `transfer.isolated_network`."""
    rank_port: Port = 0
    """With several `nodes`: where a worker listens, at its own host, for its ranks on the others. Workers whose
    `addresses` are stated, and may share a machine, add their index."""
    join_s: Seconds = 600.0
    """With several `nodes`: how long a worker waits for its ranks on the others, before it gives up and ends."""
    drain_s: Seconds = 30.0
    """Most time to finish outstanding work after SIGTERM."""
    block_size: BlockSize | None = None
    """This pool's own `engine.block_size`."""
    kv_dtype: CacheDtype | None = None
    """This pool's own `engine.kv_dtype`. What the prefill pool caches in the model's dtype is converted on its way to
    a decode pool that caches codes, and the other way round; codes are never made of other codes."""

    @property
    def ranks_per_node(self) -> int:
        """Of one worker on one machine."""
        return self.tensor_parallel_size // self.nodes


def mistaken_nodes(pool: PoolConfig) -> str | None:
    """Why workers of the pool cannot be spread over nodes as it says; begins with the field. None: they can."""
    if pool.tensor_parallel_size % pool.nodes:
        return f"nodes is {pool.nodes}: it must divide tensor_parallel_size, which is {pool.tensor_parallel_size}"
    if pool.nodes == 1:
        return None
    if pool.gpus is not None:
        return "gpus: with several nodes a worker takes the first GPUs of each: CUDA_VISIBLE_DEVICES says which"
    if not pool.rank_port:
        return f"nodes is {pool.nodes}: rank_port must say where a worker listens for its ranks on other nodes"
    if pool.rank_port == pool.port:
        return f"rank_port is {pool.rank_port}, which is port, too"
    if pool.rank_port + pool.replicas > 65536:
        return f"rank_port is {pool.rank_port}: with one for each of {pool.replicas} workers it goes beyond 65535"
    return None


def mistaken_context(context: int | None, num_blocks: int | None, block_size: int) -> str | None:
    """Why a pool that is sized by hand cannot hold the context that is stated; None: it can, or one of them is not."""
    if context is None or num_blocks is None or num_blocks * block_size >= context:
        return None
    return (
        f"engine.num_blocks is {num_blocks}, which with blocks of {block_size} is {num_blocks * block_size} tokens:"
        f" model.max_model_len is {context} and takes at least {-(-context // block_size)} blocks"
    )
