"""One layer of the paged cache as kernels read it, in the model's dtype or in codes (engine/kv_storage/kv_codes.py).

int8 has one float32 scale per token and key-value head, which follow a block's codes in memory, so that the stride of
blocks exceeds the length of their codes; fp8_e4m3 has one per key-value head of K and of V, the model's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_storage.kv_codes import LARGEST_CODE
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPages:
    """Keys and values of one layer. Raises ConfigError unless each block is contiguous and has its dtype's scales."""

    pages: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    token_scales: Tensor | None = None  # float32 [num_blocks, 2, num_kv_heads, block_size], with int8
    head_scales: Tensor | None = None  # float32 [2, num_kv_heads], with fp8_e4m3

    def __post_init__(self) -> None:
        if self.pages.dim() != 5 or not self.pages[:1].is_contiguous():
            raise ConfigError("KV pages must have five dimensions and contiguous blocks")
        wanted = (self.pages.dtype is torch.int8, self.pages.dtype is torch.float8_e4m3fn)
        if wanted != (self.token_scales is not None, self.head_scales is not None):
            raise ConfigError(
                f"scales do not fit a KV cache in {self.pages.dtype}: int8 has them by token, fp8_e4m3 by head"
            )
        _check_scales(self.token_scales, self.pages.shape[:-1], "token and head")
        _check_scales(self.head_scales, self.pages.shape[1:3], "key-value head of K and of V")

    @property
    def is_quantised(self) -> bool:
        """Whether values are eight-bit codes."""
        return self.pages.dtype in LARGEST_CODE

    @property
    def block_stride(self) -> int:
        """Number of values from one block to the next."""
        return self.pages.stride(0)

    @property
    def scale_stride(self) -> int:
        """Number of scales from one block to the next; 0 without any."""
        return 0 if self.token_scales is None else self.token_scales.stride(0)

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self.pages.shape[3]

    @property
    def head_dim(self) -> int:
        return self.pages.shape[4]


def _check_scales(scales: Tensor | None, shape: torch.Size, what: str) -> None:
    if scales is None:
        return
    if scales.shape != shape or scales.dtype != torch.float32 or not scales[:1].is_contiguous():
        raise ConfigError(f"KV scales must be contiguous float32, one per {what}")


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is neither below `value` nor below `least`."""
    return max(least, 1 << (value - 1).bit_length())
