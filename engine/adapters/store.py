"""The adapters of a worker: read from their directories, laid out for its ranks, held in slots."""

from dataclasses import dataclass
from pathlib import Path

from engine.adapters.kernels import MOST_ADAPTERS, AdapterKernels
from engine.adapters.packing import RankAdapter, adapted_parts, pack_adapter
from engine.adapters.peft_files import read_pairs
from engine.distributed.ranks.ranks import Ranks
from engine.kv_storage.paged_cache import TORCH_DTYPES
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError


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

    def read(self, path: Path) -> PackedAdapter:
        """Read an adapter's directory, all of it. Raises ConfigError for what is wrong with its files, and where it is
        larger than all memory for adapters.
        """
        parts = (part for parts in self._sites.values() for part in parts)
        pairs = read_pairs(path, parts, max_rank=self._max_rank)
        packed = PackedAdapter(
            ranks=tuple(pack_adapter(pairs, self._sites, shard, self._dtype) for shard in self._shards)
        )
        if packed.num_bytes > self.capacity_bytes:
            raise ConfigError(
                f"adapter {path} takes {packed.num_bytes} bytes, engine.adapter_bytes leaves {self.capacity_bytes}"
            )
        return packed

    def put(self, slot: int, packed: PackedAdapter) -> None:
        """Hold an adapter in a slot that no request has. Raises RankLost."""
        self._ranks.hold_adapter(slot, packed.ranks)
        self._kernels.put(slot, packed.ranks[0])

    def drop(self, slot: int) -> None:
        """Empty a slot that no request has. Raises RankLost."""
        self._ranks.hold_adapter(slot, None)
        self._kernels.drop(slot)
