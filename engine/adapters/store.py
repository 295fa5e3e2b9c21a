"""The adapters of a worker: read from their directories, laid out for its ranks, held in slots."""

from dataclasses import dataclass

import torch

from engine.adapters.kernels import MOST_ADAPTERS, AdapterKernels
from engine.adapters.packing import MOST_ADAPTER_BYTES, RankAdapter, adapted_parts, pack_adapter
from engine.adapters.peft_files import read_pairs
from engine.distributed.ranks.ranks import Ranks
from engine.kv_storage.paged_cache import TORCH_DTYPES
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from tandem.adapters.files import AdapterContent
from tandem.errors import ConfigError

_MAX_HEADER_BYTES = 8 << 20
"""Room for what a file holds beside values: names and places of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """An adapter as the ranks of a worker hold it."""

    ranks: tuple[RankAdapter, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of one rank; the most of any."""
        return max(rank.values.nbytes for rank in self.ranks)


class AdapterStore:
    """Reads adapters on any thread; `put` and `drop` belong to the engine's thread, between two steps."""

    num_slots = MOST_ADAPTERS

    def __init__(
        self,
        config: ModelSpec,
        kernels: AdapterKernels,
        ranks: Ranks,
        *,
        dtype: str,
        capacity_bytes: int,
        max_rank: int,
    ) -> None:
        """`capacity_bytes`: memory of one rank for all adapters; whoever fills the slots keeps to it."""
        self.capacity_bytes = capacity_bytes
        self._kernels = kernels
        self._ranks = ranks
        self._dtype = TORCH_DTYPES[dtype]
        self._max_rank = max_rank
        self._sites = adapted_parts(config)
        self._shards = tuple(Shard(config, rank=rank, size=ranks.group.size) for rank in range(ranks.group.size))

    @property
    def max_file_bytes(self) -> int:
        """Size of a file beyond which its matrices do not fit: in float32, each at one rank only."""
        num_values = self.capacity_bytes // self._dtype.itemsize * len(self._shards)
        return num_values * torch.float32.itemsize + _MAX_HEADER_BYTES

    def read(self, content: AdapterContent) -> PackedAdapter:
        """Read an adapter. Raises ConfigError for what is wrong with its files, and where it is larger than all memory
        for adapters, or than a message to another rank may be.
        """
        parts = (part for parts in self._sites.values() for part in parts)
        pairs = read_pairs(content, parts, max_rank=self._max_rank)
        ranks = []
        for shard in self._shards:
            ranks.append(pack_adapter(pairs, self._sites, shard, self._dtype))
            num_bytes = ranks[-1].values.nbytes
            if num_bytes > self.capacity_bytes:
                raise ConfigError(f"it takes {num_bytes} bytes, engine.adapter_bytes leaves {self.capacity_bytes}")
            if len(self._shards) > 1 and num_bytes > MOST_ADAPTER_BYTES:
                raise ConfigError(f"it takes {num_bytes} bytes of each rank, where at most {MOST_ADAPTER_BYTES} can be")
        return PackedAdapter(ranks=tuple(ranks))

    def put(self, slot: int, packed: PackedAdapter) -> None:
        """Hold an adapter in a slot that no request has. Raises RankLost."""
        self._ranks.hold_adapter(slot, packed.ranks)
        self._kernels.put(slot, packed.ranks[0])

    def drop(self, slot: int) -> None:
        """Empty a slot that no request has. Raises RankLost."""
        self._ranks.hold_adapter(slot, None)
        self._kernels.drop(slot)
