"""SmoothQuant: moves the range of a projection's inputs into its weights, so that both fit eight bits.

Xiao, Lin, Seznec, Wu, Demouth and Han, 2022 (https://arxiv.org/abs/2211.10438). A few channels of what a norm returns
are far larger than all others, and take resolution from them when a row is rounded by its largest value. The norm's
weight, and its bias, are divided by a factor for each channel, the columns of the projections that read it multiplied
by the same: the model computes the same function. Only a norm's results can be smoothed that way; what attention and
the MLP return is left as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.parameters import StoredPart
from engine.model.spec import LayerSpec

_ALPHA = 0.5
"""How much of the inputs' range is moved: 0 none of it, 1 all."""


@dataclass(frozen=True, slots=True)
class NormReaders:
    """A norm of a layer and the projections that read what it returns, by the parameter table's names in a layer."""

    norm: str
    projections: tuple[str, ...]


def norm_readers(layer: LayerSpec) -> tuple[NormReaders, ...]:
    """The norms of a layer with a dense MLP that projections read; none where a family has no norms there."""
    if not layer.has_input_norms:
        return ()
    if layer.is_parallel:
        return (NormReaders("attention_norm", ("qkv", "gate_up")),)
    return NormReaders("attention_norm", ("qkv",)), NormReaders("mlp_norm", ("gate_up",))


def smoothing_factors(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """By what to divide each channel of the inputs, float32 `[columns]`.

    `inputs`: their largest magnitudes, `[columns]`; `weights`: of all matrices that read them, `[rows, columns]`. A
    channel without inputs or weights keeps its range.
    """
    largest = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    factors = inputs.float().pow(_ALPHA) / largest.pow(1.0 - _ALPHA)
    return torch.where(torch.isfinite(factors) & (factors > 0.0), factors, 1.0)


def fold(norm: Mapping[StoredPart, Tensor], factors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Divide what a norm returns by factors for its channels, `[columns]`.

    `norm`: its stored weight and bias. Returns them changed, by their stored names and in their stored dtypes, and the
    factors that columns of weights have to be multiplied by. These are not quite those asked for: the norm's weight is
    rounded to its dtype, and they make up for that. A channel that this would lose, as its weight leaves the
    dtype's range, keeps its range.
    """
    weight, part = next((tensor, part) for part, tensor in norm.items() if part.name.endswith(".weight"))
    # A family may store what its weights exceed 1 by.
    scale = weight.float() + part.offset
    divided = (scale / factors - part.offset).to(weight.dtype)
    applied = scale / (divided.float() + part.offset)
    is_kept = ~torch.isfinite(applied) | ~torch.isfinite(divided.float()) | (applied <= 0.0)
    changed = {part.name: torch.where(is_kept, weight, divided)}
    applied = torch.where(is_kept, 1.0, applied)
    for other, tensor in norm.items():
        if other is not part:
            changed[other.name] = (tensor.float() / applied).to(tensor.dtype)
    return changed, applied
