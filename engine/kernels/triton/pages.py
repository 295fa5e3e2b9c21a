"""How kernels see one layer of the paged cache, in the cache's own dtype or quantised to eight bits.

Quantised values carry one float32 scale per token and key-value head, `[num_blocks, 2, num_kv_heads, block_size]`,
in a tensor beside the pages: the largest magnitude of the head's vector over the largest code. Per token, because
tokens are written one at a time: a scale per block would have to requantise a block whenever a later token is larger,
so that content would depend on how a prompt was cut, and a block would not be final until full. Per head, because
magnitudes of keys differ between heads by far more than a code's range forgives. It costs `4 / head_dim` of the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import ConfigError

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Of each eight-bit dtype that a cache may have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPages:
    """Keys and values of one layer. Raises ConfigError unless contiguous, and scaled exactly when quantised."""

    pages: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    scales: Tensor | None = None  # float32 [num_blocks, 2, num_kv_heads, block_size]

    def __post_init__(self) -> None:
        if not self.pages.is_contiguous() or self.pages.dim() != 5:
            raise ConfigError("KV pages must be contiguous and have five dimensions")
        if self.is_quantised != (self.scales is not None):
            raise ConfigError(f"a KV cache of {self.pages.dtype} {'needs' if self.is_quantised else 'takes no'} scales")
        if self.scales is not None and (
            self.scales.shape != self.pages.shape[:-1]
            or self.scales.dtype != torch.float32
            or not self.scales.is_contiguous()
        ):
            raise ConfigError("KV scales must be contiguous float32, one per token and head")

    @property
    def is_quantised(self) -> bool:
        """Whether values are eight-bit codes."""
        return self.pages.dtype in LARGEST_CODE

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self.pages.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pages.shape[3]

    @property
    def head_dim(self) -> int:
        """Values per head."""
        return self.pages.shape[4]


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is neither below `value` nor below `least`."""
    return max(least, 1 << (value - 1).bit_length())
