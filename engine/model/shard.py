"""Assigns the parts of a model to the ranks of a tensor-parallel group. Pure.

After Megatron-LM (Shoeybi et al., 2019): the projections that open a block are split by output rows (whole heads, whole
pairs of gate and up), those that close it by input columns, so that a block needs one sum over the ranks, at its end.
Experts are split alike: every rank has a part of each. Vocabulary rows are split too; every rank has all norms. Where
there are fewer key-value heads than ranks, several ranks have the same one.
"""

from dataclasses import dataclass, replace

from engine.model.parameters import Split, StoredPart
from engine.model.spec import ModelSpec, MoeSpec
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A range of a tensor's rows (`dim` 0) or columns (1)."""

    dim: int
    begin: int
    end: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.end - self.begin, *whole[self.dim + 1 :])


class Shard:
    """One rank's share of one model."""

    def __init__(self, config: ModelSpec, *, rank: int, size: int) -> None:
        """Raises ConfigError, naming the field of config.json, when the model cannot be split over `size` ranks."""
        _check_divides(config, size)
        self._rank = rank
        vocab_rows = -(-config.vocab_size // size)
        layers = tuple(
            replace(
                layer,
                intermediate_size=layer.intermediate_size // size,
                num_heads=layer.num_heads // size,
                num_kv_heads=max(1, layer.num_kv_heads // size),
                moe=None if layer.moe is None else _share(layer.moe, size),
            )
            for layer in config.layers
        )
        self.config = replace(config, vocab_size=vocab_rows, layers=layers)
        """Architecture of this rank's part; its vocabulary may include padding rows beyond the model's."""
        self.first_token = rank * vocab_rows
        self.first_kv_head = rank // max(1, size // config.num_kv_heads) * self.config.num_kv_heads
        self._units = {
            Split.HEADS: (rank * self.config.num_heads, self.config.num_heads),
            Split.KV_HEADS: (self.first_kv_head, self.config.num_kv_heads),
            Split.INNER: (rank * self.config.intermediate_size, self.config.intermediate_size),
            Split.VOCABULARY: (self.first_token, vocab_rows),
        }
        """First unit and number of units of this rank."""
        if (moe := self.config.moe) is not None:
            self._units[Split.EXPERT_INNER] = (rank * moe.expert_size, moe.expert_size)
            self._units[Split.SHARED_INNER] = (rank * (moe.shared_size or 0), moe.shared_size or 0)

    def holds(self, part: StoredPart) -> bool:
        """Whether this rank reads any of a stored part. Of a vocabulary, the last ranks may hold no rows."""
        if part.split in (Split.NONE, Split.VOCABULARY):
            return self._rank == 0 or not part.is_added_once
        found = self.slice(part)
        return found is not None and found.end > found.begin

    def slice(self, part: StoredPart) -> TensorSlice | None:
        """The slice of the stored tensor that this rank reads; None: all of it."""
        if part.split is Split.NONE:
            return None
        first, count = self._units[part.split]
        begin = min(max(first - part.first_unit, 0), part.num_units)
        end = min(max(first + count - part.first_unit, begin), part.num_units)
        return TensorSlice(dim=part.dim, begin=part.begin + begin * part.unit, end=part.begin + end * part.unit)


def _share(moe: MoeSpec, size: int) -> MoeSpec:
    """A rank's part of all experts."""
    shared_size = None if moe.shared_size is None else moe.shared_size // size
    return replace(moe, expert_size=moe.expert_size // size, shared_size=shared_size)


def _check_divides(config: ModelSpec, size: int) -> None:
    counts = {"num_attention_heads": config.num_heads}
    # Families without a size of experts in config.json have this one for them.
    if (moe := config.moe) is None or moe.expert_size == config.intermediate_size or not config.is_sparse_throughout:
        counts["intermediate_size"] = config.intermediate_size
    if moe is not None:
        counts["moe_intermediate_size"] = moe.expert_size
        counts["shared_expert_intermediate_size"] = moe.shared_size or 0
    for field, count in counts.items():
        if count % size:
            raise ConfigError(f"tensor_parallel_size is {size}: it must divide config.json's {field}, which is {count}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {size}: it must divide config.json's num_key_value_heads or be a multiple of "
            f"them; there are {kv_heads}"
        )
