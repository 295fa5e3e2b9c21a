"""What rank 0 and the others tell each other beside steps, as values and as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.backends.options import BackendOptions
from engine.kv_storage.free_memory import HostRoom
from engine.model.gpu_memory import GpuWish
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank is to load and how it meets the others."""

    rank: int
    size: int
    model_path: Path
    backend: BackendOptions
    log_level: str
    timeout_s: float
    """How long one rank waits for another: to start a collective, to listen."""
    log_format: str = "text"
    num_nodes: int = 1
    """Machines over which the ranks are spread, as many on each, in order."""
    num_threads: int | None = None
    """Of each rank, as configured; None: its part of its machine's processors."""
    num_sharers: int = 1
    """Ranks that share a machine."""
    gpus: tuple[int, ...] = ()
    """GPUs of the other ranks, by the numbering of the process that started the worker; empty: by CUDA's."""
    gpu_sharers: int = 1
    """Workers on one GPU."""
    stated_bytes: int | None = None
    """What each rank may take, where that is stated."""

    @property
    def ranks_per_node(self) -> int:
        """The same on every node."""
        return self.size // self.num_nodes

    @property
    def is_beside_rank_0(self) -> bool:
        """On the same node."""
        return self.rank < self.ranks_per_node

    @property
    def gpu_wish(self) -> GpuWish:
        """What this rank is to have of its GPU."""
        local = self.rank % self.ranks_per_node
        index = self.gpus[local] if self.is_beside_rank_0 and self.gpus else local
        return GpuWish(index=index, sharers=self.gpu_sharers, stated_bytes=self.stated_bytes)

    def of_rank(self, rank: int) -> "RankSetup":
        """The same for another rank: on a machine with GPUs, on its own."""
        options = self.backend
        if options.device.type == "cuda":
            options = replace(options, device=torch.device("cuda", rank % self.ranks_per_node))
        return replace(self, rank=rank, backend=options)

    def on_own_machine(self, threads_of_one: Callable[[int | None, int], int]) -> BackendOptions:
        """How this rank computes where it is: another machine than rank 0's may have more processors, or fewer."""
        if self.is_beside_rank_0:
            return self.backend
        num_threads = threads_of_one(self.num_threads, self.num_sharers)
        binds = num_threads > 1 and self.num_sharers == 1
        return replace(self.backend, num_threads=num_threads, binds_threads=binds)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "RankSetup":
        """What `to_json` was given."""
        values = json.loads(bytes(data))
        options = values.pop("backend")
        options["device"] = torch.device(options["device"])
        values["model_path"] = Path(values["model_path"])
        values["gpus"] = tuple(values["gpus"])
        return cls(**values, backend=BackendOptions(**options))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank says of itself once it has its part of the model."""

    weights_bytes: int
    fingerprint: str
    limit_bytes: int | None = None
    """What it may take of memory that is not rank 0's, weights included; None where all ranks share the machine's."""
    room: HostRoom | None = None
    """Of its machine, with its weights there; None on rank 0's, who looks itself."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "RankFacts":
        """What `to_json` was given."""
        values = json.loads(bytes(data))
        room = values.pop("room")
        return cls(**values, room=None if room is None else HostRoom(**room))


def tightest(everyone: Sequence[RankFacts]) -> RankFacts:
    """The largest weights, the lowest limit and the machine with the least room, of all ranks from rank 0 on."""
    limits = [facts.limit_bytes for facts in everyone if facts.limit_bytes is not None]
    rooms = [
        replace(facts.room, where=f"rank {rank} ({facts.room.where})")
        for rank, facts in enumerate(everyone)
        if facts.room is not None
    ]
    return replace(
        everyone[0],
        weights_bytes=max(facts.weights_bytes for facts in everyone),
        limit_bytes=min(limits, default=None),
        room=min(rooms, key=lambda room: room.free_bytes, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The KV cache that a rank is to serve with."""

    layout: KVLayout
    """With this rank's `tp_rank`."""
    num_blocks: int
    num_host_slots: int = 0
    """Places for blocks in host memory, the same on every rank."""

    @property
    def rank_bytes(self) -> int:
        """One rank's share of a pool that all ranks lay side by side."""
        return self.num_blocks * self.layout.block_bytes

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: memoryview) -> "PoolPlan":
        """What `to_json` was given."""
        values: Mapping[str, Any] = json.loads(bytes(data))
        return cls(**{**values, "layout": KVLayout(**values["layout"])})


class PoolMemory(Protocol):
    """Host memory that other processes can map: `[rank, layer, block, …]`, the ranks' parts side by side."""

    @property
    def buffer(self) -> memoryview:
        """All of it, here."""
        ...

    @property
    def fd(self) -> int:
        """To map it elsewhere."""
        ...

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays."""
        ...
