"""From the cluster's configuration to what a prefill worker needs."""

from engine.distributed.links.node_group import NodeGroup
from engine.spec import EngineSpec
from tandem.config.cluster import ClusterConfig
from tandem.config.gpu_placement import GpuSeat
from tandem.config.worker import cluster_secret, disk_folder, memory_here_bytes, num_ranks
from tandem.model_path import model_directory
from worker.kv_exchange.config import compute_dtype


def engine_spec(config: ClusterConfig, nodes: NodeGroup | None = None, seat: GpuSeat | None = None) -> EngineSpec:
    """The engine of one worker; `nodes`: where its ranks are that are not on this machine; `seat`: on which GPUs it is.

    Raises ConfigError.
    """
    seat = seat or GpuSeat(gpus=())
    return EngineSpec(
        # Prompts under a hand-off are never preempted: nothing would ever be saved.
        **config.engine_of(config.prefill).model_dump()
        | {"offload_bytes": 0, "disk_cache_path": disk_folder(config, "prefill")},
        model_path=model_directory(config.model.path),
        dtype=compute_dtype(config),
        max_model_len=config.model.max_model_len,
        num_workers_here=num_ranks(config, config.prefill),
        memory_here_bytes=memory_here_bytes(config, config.prefill),
        secret=cluster_secret(config),
        tensor_parallel_size=config.prefill.tensor_parallel_size,
        gpus=seat.gpus,
        gpu_sharers=seat.sharers,
        nodes=nodes,
    )
