"""Messages between rank 0 and the other ranks, except steps, as values and as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.backends.options import BackendOptions
from engine.model.gpu_memory import GpuMemoryRequest
from tandem.process.host_memory import HostRoom
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Configuration of a rank: the model to load, and how it computes and meets the others."""

    rank: int
    size: int
    model_path: Path
    backend: BackendOptions
    log_level: str
    timeout_s: float
    """Longest wait of one rank for another to start a collective or to answer."""
    log_format: str = "text"
    num_nodes: int = 1
    """Number of machines over which the ranks are spread evenly, in order."""
    num_threads: int | None = None
    """Threads of each rank, as configured; None: its share of its machine's processors."""
    num_sharers: int = 1
    """Number of ranks that share a machine."""
    gpus: tuple[int, ...] = ()
    """GPUs of the ranks on rank 0's node, by the numbering of the process that started the worker; empty: by CUDA's."""
    gpu_sharers: int = 1
    """Number of workers that share a GPU."""
    configured_bytes: int | None = None
    """Memory limit of each rank, if configured."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.size // self.num_nodes

    @property
    def is_beside_rank_0(self) -> bool:
        """Whether the rank is on rank 0's node."""
        return self.rank < self.ranks_per_node

    @property
    def gpu_memory_request(self) -> GpuMemoryRequest:
        """Memory that this rank asks of its GPU."""
        local = self.rank % self.ranks_per_node
        index = self.gpus[local] if self.is_beside_rank_0 and self.gpus else local
        return GpuMemoryRequest(index=index, sharers=self.gpu_sharers, configured_bytes=self.configured_bytes)

    def of_rank(self, rank: int) -> "RankSetup":
        """This setup for another rank; on a machine with GPUs, with that rank's own."""
        options = self.backend
        if options.device.type == "cuda":
            options = replace(options, device=torch.device("cuda", rank % self.ranks_per_node))
        return replace(self, rank=rank, backend=options)

    def on_own_machine(self, threads_per_process: Callable[[int | None, int], int]) -> BackendOptions:
        """Backend options for this rank's machine, which may have more or fewer processors than rank 0's."""
        if self.is_beside_rank_0:
            return self.backend
        num_threads = threads_per_process(self.num_threads, self.num_sharers)
        binds = num_threads > 1 and self.num_sharers == 1
        return replace(self.backend, num_threads=num_threads, binds_threads=binds)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "RankSetup":
        """Decode the output of `to_json`."""
        values = json.loads(bytes(data))
        options = values.pop("backend")
        options["device"] = torch.device(options["device"])
        values["model_path"] = Path(values["model_path"])
        values["gpus"] = tuple(values["gpus"])
        return cls(**values, backend=BackendOptions(**options))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """A rank's report once it has loaded its part of the model."""

    weights_bytes: int
    fingerprint: str
    limit_bytes: int | None = None
    """Memory limit of the rank, weights included; None on rank 0's node where all ranks share the host's memory."""
    room: HostRoom | None = None
    """Free memory of its machine, once the weights are loaded; None on rank 0's node, where rank 0 measures it."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "RankFacts":
        """Decode the output of `to_json`."""
        values = json.loads(bytes(data))
        room = values.pop("room")
        return cls(**values, room=None if room is None else HostRoom(**room))


def combine_facts(ranks: Sequence[RankFacts]) -> RankFacts:
    """Combine the facts of all ranks, rank 0 first: largest weights, lowest limit, machine with the least free
    memory.
    """
    limits = [facts.limit_bytes for facts in ranks if facts.limit_bytes is not None]
    rooms = [
        replace(facts.room, where=f"rank {rank} ({facts.room.where})")
        for rank, facts in enumerate(ranks)
        if facts.room is not None
    ]
    return replace(
        ranks[0],
        weights_bytes=max(facts.weights_bytes for facts in ranks),
        limit_bytes=min(limits, default=None),
        room=min(rooms, key=lambda room: room.free_bytes, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The KV cache that a rank is to serve with."""

    layout: KVLayout
    """Layout with this rank's `tp_rank`."""
    num_blocks: int
    num_host_slots: int = 0
    """Number of places for blocks in host memory, the same on every rank."""

    @property
    def rank_bytes(self) -> int:
        """Size of one rank's part of the pool; all parts lie side by side."""
        return self.num_blocks * self.layout.block_bytes

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "PoolPlan":
        """Decode the output of `to_json`."""
        values: Mapping[str, Any] = json.loads(bytes(data))
        layout = {**values["layout"], "windowed_layers": tuple(values["layout"]["windowed_layers"])}
        return cls(**{**values, "layout": KVLayout(**layout)})


class PoolMemory(Protocol):
    """Host memory that other processes can map: `[rank, layer, block, …]`, the ranks' parts side by side."""

    @property
    def buffer(self) -> memoryview:
        """The whole memory, mapped into this process."""
        ...

    @property
    def fd(self) -> int:
        """Descriptor by which other processes map it."""
        ...

    def close(self) -> None:
        """Close the descriptor; existing mappings stay."""
        ...
