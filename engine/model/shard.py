"""Assigns the parts of a model to the ranks of a tensor-parallel group. Pure.

After Megatron-LM (Shoeybi et al., 2019): the projections that open a block are split by output rows (whole heads, whole
pairs of gate and up), those that close it by input columns, so that a block needs one sum over the ranks, at its end.
Vocabulary rows are split too; every rank has all norms. Where there are fewer key-value heads than ranks, several
ranks have the same one.
"""

from dataclasses import dataclass, replace

from engine.model.config import ModelArchitecture
from tandem.errors import ConfigError

_ROW_PARALLEL = ("o_proj", "down_proj")


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

    def __init__(self, config: ModelArchitecture, *, rank: int, size: int) -> None:
        """Raises ConfigError, naming the field of config.json, when the model cannot be split over `size` ranks."""
        _check_divides(config, size)
        self._config = config
        self._rank = rank
        self._size = size
        self._replicas = max(1, size // config.num_kv_heads)
        vocab_rows = -(-config.vocab_size // size)
        self.config = replace(
            config,
            vocab_size=vocab_rows,
            intermediate_size=config.intermediate_size // size,
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
        )
        """Architecture of this rank's part; its vocabulary may include padding rows beyond the model's."""
        self.first_token = rank * vocab_rows

    def holds(self, name: str) -> bool:
        """Whether this rank reads any of a checkpoint's tensor: a bias that follows a sum is added once, by rank 0."""
        module, kind = name.split(".")[-2:]
        return self._rank == 0 or kind != "bias" or module not in _ROW_PARALLEL

    def part(self, name: str) -> TensorSlice | None:
        """The part that this rank reads of a tensor that it holds; None: all of it."""
        module, kind = name.split(".")[-2:]
        if module in _ROW_PARALLEL and kind == "bias":
            return None
        match module:
            case "q_proj" | "o_proj":
                begin, count = self._rank * self.config.num_heads, self.config.num_heads
            case "k_proj" | "v_proj":
                begin, count = self._rank // self._replicas * self.config.num_kv_heads, self.config.num_kv_heads
            case "gate_proj" | "up_proj" | "down_proj":
                begin, count = self._rank * self.config.intermediate_size, self.config.intermediate_size
            case "embed_tokens" | "lm_head":
                return self._vocabulary()
            case _:
                return None
        unit = self._config.head_dim if module in ("q_proj", "k_proj", "v_proj", "o_proj") else 1
        return TensorSlice(dim=int(module in _ROW_PARALLEL), begin=begin * unit, end=(begin + count) * unit)

    def _vocabulary(self) -> TensorSlice:
        last = self._config.vocab_size
        begin = min(self.first_token, last)
        return TensorSlice(dim=0, begin=begin, end=min(begin + self.config.vocab_size, last))


def _check_divides(config: ModelArchitecture, size: int) -> None:
    counts = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    for field, count in counts.items():
        if count % size:
            raise ConfigError(f"tensor_parallel_size is {size}: it must divide config.json's {field}, which is {count}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {size}: it must divide config.json's num_key_value_heads or be a multiple of "
            f"them; there are {kv_heads}"
        )
