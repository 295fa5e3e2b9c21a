"""The specification of an engine, derived from the cluster's configuration."""

from dataclasses import dataclass
from pathlib import Path

from engine.distributed.links.node_group import NodeGroup
from engine.types.config import SpeculationConfig
from tandem.values.kv_layout import AUTO_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The specification of an engine; tandem/config/cluster.py documents each field."""

    model_path: Path
    dtype: str
    max_model_len: int | None
    device: str
    block_size: int
    num_blocks: int | None
    memory_bytes: int | None
    max_batched_tokens: int
    prefill_chunk_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    eviction: str
    max_overtakes: int
    priority_aging_s: float | None
    num_threads: int | None
    kernels: str
    quantization: str
    deterministic: bool
    num_workers_here: int
    """Ranks of all workers that share this machine, for the defaults of memory and threads."""
    secret: bytes
    tensor_parallel_size: int = 1
    offload_bytes: int = 0
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    disk_cache_path: Path | None = None
    kv_memory: str = "shared"
    pipelined: str = "auto"
    max_step_s: float | None = None
    stall_s: float | None = None
    kv_dtype: str = AUTO_DTYPE
    windowed_layers: str = "together"
    pinned_share: float = 0.0
    pinned_tenant_share: float = 0.0
    memory_here_bytes: int | None = None
    """Sum of `memory_bytes` of all workers known to share this machine; None: only this worker's share counts."""
    gpus: tuple[int, ...] = ()
    """GPUs of the ranks here, as numbered by the process that started the worker; here they come first. Empty: both
    numberings are the same."""
    gpu_sharers: int = 1
    """Workers that share one of these GPUs' memory, this one included."""
    speculation: SpeculationConfig | None = None
    """None: no speculation."""
    takes_adapters: bool = False
    adapter_bytes: int | None = None
    max_adapter_rank: int = 64
    nodes: NodeGroup | None = None
    """Ranks on other machines and how they connect; None when all ranks are on this machine."""

    @property
    def max_step_rows(self) -> int:
        """Most rows that one step samples: one for each request, and the drafts."""
        drafts = self.speculation
        if drafts is None:
            return self.max_running_requests
        return self.max_running_requests + min(
            drafts.max_draft_rows, self.max_running_requests * drafts.max_draft_tokens
        )

    @property
    def ranks_here(self) -> int:
        """Ranks of this worker on this machine."""
        return self.tensor_parallel_size if self.nodes is None else self.nodes.ranks_per_node
