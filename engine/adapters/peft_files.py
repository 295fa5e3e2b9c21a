"""Reads the matrices of a PEFT directory: pairs `A`, `B` by the stored tensor of the model that they add to.

Only what a projection here can add is taken: a tensor of any other name (embeddings, output head, experts, biases,
DoRA's magnitudes) is refused, as are shapes that do not fit the model, values that are not finite, and an `A` without
its `B`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from engine.model.checkpoints.safetensors_files import SafetensorsFile
from engine.model.parameters import StoredPart
from tandem.adapters.files import ADAPTER_WEIGHTS, AdapterContent
from tandem.adapters.lora_config import LoraConfig, parse_lora_config
from tandem.errors import ConfigError

_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("F32", "F16", "BF16")
_SHOWN = 120


class LowRankPair(NamedTuple):
    """What an adapter adds to one stored matrix: `scale * up @ down`."""

    down: Tensor
    """`A`, `[rank, in_features]`, in the file's dtype and memory."""
    up: Tensor
    """`B`, `[out_features, rank]`, likewise."""
    scale: float


def read_pairs(content: AdapterContent, parts: Iterable[StoredPart], *, max_rank: int) -> dict[str, LowRankPair]:
    """Read an adapter's matrices, by the name of the stored tensor that they add to, e.g. `….q_proj.weight`.

    `parts`: the stored tensors that adapters can add to. Raises ConfigError, naming the file and what is wrong.
    """
    config = parse_lora_config(content.config)
    try:
        file = SafetensorsFile.held(content.weights, ADAPTER_WEIGHTS)
        return _pairs(file, config, {part.name: part.shape for part in parts}, max_rank)
    except ConfigError as error:
        raise ConfigError(f"{ADAPTER_WEIGHTS}: {error}") from None


def _pairs(
    file: SafetensorsFile, config: LoraConfig, shapes: dict[str, tuple[int, ...]], max_rank: int
) -> dict[str, LowRankPair]:
    halves: dict[str, list[Tensor | None]] = {}
    for entry in file.entries:
        end = next((i for i, name in enumerate(_ENDS) if entry.name.endswith(name)), None)
        stem = entry.name.removeprefix(_PREFIX)
        module = stem if end is None else stem.removesuffix(_ENDS[end])
        if end is None or f"{module}.weight" not in shapes:
            raise ConfigError(f"{entry.name[:_SHOWN]!r} is none of the matrices that adapters can add to")
        if entry.dtype not in _DTYPES or len(entry.shape) != 2:
            raise ConfigError(f"{entry.name[:_SHOWN]!r} is {entry.dtype} {list(entry.shape)}: floats of two dimensions")
        if entry.shape[end] > max_rank:
            raise ConfigError(
                f"{entry.name[:_SHOWN]!r} has rank {entry.shape[end]}, engine.max_adapter_rank is {max_rank}"
            )
        size = shapes[f"{module}.weight"][1 - end]
        if entry.shape[1 - end] != size or not entry.shape[end]:
            raise ConfigError(f"{entry.name[:_SHOWN]!r} is {list(entry.shape)}, which does not fit {size} values")
        pair = halves.setdefault(module, [None, None])
        if pair[end] is not None:
            raise ConfigError(f"{entry.name[:_SHOWN]!r} is there twice, with and without {_PREFIX}")
        pair[end] = file.tensor(entry)
    if not halves:
        raise ConfigError("holds no matrices")
    return {f"{name}.weight": _pair(name, down, up, config) for name, (down, up) in halves.items()}


def _pair(module: str, down: Tensor | None, up: Tensor | None, config: LoraConfig) -> LowRankPair:
    if down is None or up is None:
        raise ConfigError(f"{module} has {'lora_B' if down is None else 'lora_A'} only")
    if (rank := len(down)) != up.shape[1]:
        raise ConfigError(f"{module} has matrices of {list(down.shape)} and {list(up.shape)}, whose ranks differ")
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ConfigError(f"{module} has values that are not finite")
    return LowRankPair(down, up, config.scale(module, rank))
