"""Settings of a simulated cluster."""

from dataclasses import dataclass, field
from math import inf

from cluster.simulator.inputs.latency import StepLatency
from engine.types.config import SchedulerConfig
from router.admission.cluster_capacity import CapacityPolicy
from router.admission.types import AdmissionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Workers of one kind."""

    num_workers: int
    engine: SchedulerConfig
    latency: StepLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Latencies that replace sessions, links and timeouts between processes."""

    hop_s: float = 0.0005
    """Time of one message between two processes."""
    link_bytes_per_s: float = 25e9
    """Bandwidth of each worker's network card per direction; transfers queue at both ends."""
    load_period_s: float = 0.5
    """Time between two load reports of a worker."""
    crash_seen_s: float = 0.5
    """Time until the router notices that a process is gone."""
    freeze_seen_s: float = 2.0
    """Time until the router gives up a silent process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    prefill: PoolSpec | None
    """Prefill pool; None: decode workers compute the prompts themselves (colocated)."""
    decode: PoolSpec | None
    """Decode pool; None: only the first token of each prompt is wanted, to study prefill placement alone."""
    network: Network = field(default_factory=Network)
    max_inflight: int = 1_000_000
    """Maximum number of requests that the router runs at once."""
    admission: AdmissionPolicy | None = None
    """Admission policy; None: the default one of a router for these workers."""

    @property
    def admission_policy(self) -> AdmissionPolicy:
        """Return `admission`, or the default policy for workers such as these."""
        if self.admission is not None:
            return self.admission
        pool = self.decode or self.prefill
        room = (
            CapacityPolicy()
            if pool is None
            else CapacityPolicy(max_running_per_worker=pool.engine.max_running_requests)
        )
        return AdmissionPolicy(room=room)


def unlimited_admission() -> AdmissionPolicy:
    """Return a policy that never queues or rejects, except for memory: for studying placement alone."""
    return AdmissionPolicy(max_queue_s=inf, room=CapacityPolicy(worker_backlog_s=inf, max_running_per_worker=2**40))


def engine_config(
    *,
    num_blocks: int,
    block_size: int,
    max_running_requests: int = 256,
    chunk_tokens: int = 2048,
    max_step_s: float | None = None,
) -> SchedulerConfig:
    """Return the engine's limits, without those that a simulation does not need."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=num_blocks * block_size,
        max_batched_tokens=chunk_tokens + max_running_requests,
        prefill_chunk_tokens=chunk_tokens,
        max_step_s=max_step_s,
        max_running_requests=max_running_requests,
        max_waiting_requests=1_000_000,
        kv_event_capacity=1_000_000,
        eos_token_ids=frozenset(),
        eviction="lru",
        max_overtakes=8,
        priority_aging_s=None,
    )
