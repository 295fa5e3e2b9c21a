"""Rotary position embedding (Su et al., 2021) with the usual ways of stretching it.

Sources: linear, position interpolation (Chen et al., 2023); dynamic, NTK-aware scaling (bloc97, emozilla, 2023);
llama3, the frequency bands of Llama 3.1's release; yarn, Peng et al., 2023; longrope, Ding et al., 2024.

Pairs are (i, i + head_dim / 2) of a head in the kernels' order (`engine.model.parameters.head_order`): where only a
part of a head is rotated, or none, the other pairs have angle zero.

Scaling by length and caches. With dynamic scaling transformers derives the frequencies of one forward pass from its
longest sequence, so a token's key would depend on tokens that come after it, and on how a prompt was cut into chunks.
Blocks here are named by the tokens up to their end, and may be reused, moved or recomputed in other chunks; so the
rotation of position p depends on p alone: as for a sequence of p + 1 tokens. That equals transformers for all sequences
within `max_position_embeddings` and for every token generated with a cache, one by one, beyond it. It differs
from transformers only inside a prompt that is itself longer than `max_position_embeddings`, where transformers
rotates all of the prompt by the prompt's length. longrope's two sets of frequencies are chosen likewise: the long ones
from position `original_max_position_embeddings` on.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.rope_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Angles of any position, computed without a table: that costs less than looking them up once per step."""

    def __init__(self, config: RopeConfig | None, head_dim: int, device: torch.device | str = "cpu") -> None:
        """`config`: None for layers that do not rotate."""
        rotated = 0 if config is None else config.rotary_dim(head_dim)
        self._config = config or RopeConfig(max_positions=1, original_max_positions=1)
        self._num_still = (head_dim - rotated) // 2
        self._exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / max(1, rotated)
        self._frequencies = base_frequencies(self._config, rotated).to(device)  # [rotated / 2]
        self._long_frequencies = long_frequencies(self._config, rotated).to(device)
        self._ntk_power = rotated / (rotated - 2) if rotated > 2 else 1.0

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine for `rotate_`, each `[num_rows, 1, head_dim]`."""
        cos, sin = self.half_angles(positions)
        both = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
        return both[0].to(dtype)[:, None, :], both[1].to(dtype)[:, None, :]

    def half_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair (i, i + head_dim / 2): float32 `[num_rows, head_dim / 2]`."""
        exact = positions.to(torch.float32)[:, None]
        if self._config.rope_type is RopeType.DYNAMIC:
            frequencies = self._dynamic_frequencies(exact)
        elif self._config.rope_type is RopeType.LONGROPE:
            is_long = exact >= self._config.original_max_positions
            frequencies = torch.where(is_long, self._long_frequencies, self._frequencies)
        else:
            frequencies = self._frequencies
        half = exact * frequencies  # [num_rows, rotated / 2]
        cos, sin = half.cos(), half.sin()
        if self._config.attention_factor != 1.0:
            cos, sin = cos * self._config.attention_factor, sin * self._config.attention_factor
        if self._num_still:
            cos, sin = F.pad(cos, (0, self._num_still), value=1.0), F.pad(sin, (0, self._num_still))
        return cos, sin

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:
        config = self._config
        stretch = (positions + 1.0).clamp_(min=float(config.max_positions)) / config.max_positions
        base = config.theta * (config.factor * stretch - (config.factor - 1.0)) ** self._ntk_power
        return 1.0 / base**self._exponents  # [num_rows, head_dim / 2]


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `[num_rows, num_heads, head_dim]` in place; pairs are (i, i + head_dim / 2), as Hugging Face stores."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def base_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, `[head_dim / 2]`, in float32; `head_dim`: elements that are rotated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / max(1, head_dim)
    if config.rope_type is RopeType.LONGROPE:
        return 1.0 / (torch.tensor(config.short_factors) * config.theta**exponents)
    frequencies = 1.0 / config.theta**exponents
    if config.rope_type is RopeType.LINEAR:
        return frequencies / config.factor
    if config.rope_type is RopeType.FACTORS:
        return frequencies / torch.tensor(config.factors, dtype=torch.float32)
    if config.rope_type is RopeType.LLAMA3:
        return _llama3(config, frequencies)
    if config.rope_type is RopeType.YARN:
        return _yarn(config, frequencies, head_dim)
    return frequencies


def long_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """The same beyond the original context, where longrope has others."""
    if config.rope_type is not RopeType.LONGROPE:
        return base_frequencies(config, head_dim)
    return base_frequencies(replace(config, short_factors=config.long_factors), head_dim)


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend between the two bands."""
    turns = config.original_max_positions * frequencies / (2 * math.pi)  # within the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Interpolate pairs that turn less than `beta_slow` times in the original context, keep those above `beta_fast`."""

    def pair_of(turns: float) -> float:
        wavelengths = config.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / config.factor * ramp + frequencies * (1.0 - ramp)
