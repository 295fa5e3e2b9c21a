"""What a simulated cluster is made of."""

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
    """What separates the processes: latencies, in place of sessions, links and time-outs."""

    hop_s: float = 0.0005
    """One message between two processes."""
    link_bytes_per_s: float = 25e9
    """Of each worker's card, one way; transfers queue for both ends."""
    load_period_s: float = 0.5
    """Between two load reports of a worker."""
    crash_seen_s: float = 0.5
    """Until the router knows that a process is gone."""
    freeze_seen_s: float = 2.0
    """Until the router gives a silent one up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    prefill: PoolSpec | None
    """None: decode workers compute the prompts themselves (colocated)."""
    decode: PoolSpec | None
    """None: of every prompt only the first token is wanted, and placement of prefill alone is looked at."""
    network: Network = field(default_factory=Network)
    max_inflight: int = 1_000_000
    """Requests that the router runs at once."""
    admission: AdmissionPolicy | None = None
    """Who waits before that, and who is turned away; None: as a router does that is not told otherwise."""

    @property
    def door(self) -> AdmissionPolicy:
        """`admission`, or the usual one for workers such as these."""
        if self.admission is not None:
            return self.admission
        pool = self.decode or self.prefill
        room = (
            CapacityPolicy()
            if pool is None
            else CapacityPolicy(max_running_per_worker=pool.engine.max_running_requests)
        )
        return AdmissionPolicy(room=room)


def open_door() -> AdmissionPolicy:
    """Nobody waits but for memory, whatever the workers have to do: for looking at placement alone."""
    return AdmissionPolicy(max_queue_s=inf, room=CapacityPolicy(worker_backlog_s=inf, max_running_per_worker=2**40))


def engine_config(
    *,
    num_blocks: int,
    block_size: int,
    max_running_requests: int = 256,
    chunk_tokens: int = 2048,
    max_step_s: float | None = None,
) -> SchedulerConfig:
    """The engine's bounds, but for what a simulation has no use for."""
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
