"""Derives the specification of one worker's engine from the cluster's configuration."""

from engine.distributed.links.node_group import NodeGroup
from engine.model.dtype import resolve_dtype
from engine.spec import EngineSpec
from engine.types.config import SpeculationConfig
from tandem.config.cluster import ClusterConfig
from tandem.config.gpu_placement import GpuSeat
from tandem.config.worker import check_adapters, cluster_secret, disk_folder, memory_here_bytes, num_ranks
from tandem.errors import ConfigError
from tandem.model_path import model_directory
from tandem.values.roles import WorkerRole


def engine_spec(
    config: ClusterConfig, role: WorkerRole, nodes: NodeGroup | None = None, seat: GpuSeat | None = None
) -> EngineSpec:
    """The engine of one worker; `nodes`: the nodes of its ranks, `seat`: the GPUs it runs on.

    Raises ConfigError.
    """
    seat = seat or GpuSeat(gpus=())
    check_adapters(config)
    pool = config.prefill if role is WorkerRole.PREFILL else config.decode
    settings = config.engine_of(pool).model_dump() | {"disk_cache_path": disk_folder(config, role.value)}
    del settings["quality_gate"]  # the worker's own
    speculation = SpeculationConfig(**settings.pop("speculation"))
    has_drafts = bool(speculation.sources) and role is not WorkerRole.PREFILL
    if role is WorkerRole.PREFILL:
        # Prompts that are handed off are never preempted, so the buffer would stay unused.
        settings["offload_bytes"] = 0
    return EngineSpec(
        **settings,
        takes_adapters=config.model.takes_adapters,
        speculation=speculation if has_drafts else None,
        model_path=model_directory(config.model.path),
        dtype=compute_dtype(config),
        max_model_len=config.model.max_model_len,
        num_workers_here=num_ranks(config, pool),
        memory_here_bytes=memory_here_bytes(config, pool),
        secret=cluster_secret(config),
        tensor_parallel_size=pool.tensor_parallel_size,
        gpus=seat.gpus,
        gpu_sharers=seat.sharers,
        nodes=nodes,
    )


def compute_dtype(config: ClusterConfig) -> str:
    """The dtype a worker computes in: `model.dtype`, or what `auto` stands for with this model.

    Raises ConfigError when the model cannot be read, or when KV of that dtype cannot be sent as `transfer.wire_dtype`.
    """
    dtype = resolve_dtype(config.model.dtype, config.model.path)
    if reason := config.wire_dtype_problem(dtype):
        raise ConfigError(f"{reason} (model.dtype {config.model.dtype} is {dtype} here)")
    return dtype
