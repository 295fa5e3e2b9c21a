"""Keys and values as eight-bit codes: the reference that every backend's kernels are compared with.

int8 is scaled by token and head, dynamically: code = round(value * 127 / peak), ties to even, where peak is the largest
magnitude of the head's vector, and the scale stored beside the codes is peak / 127. By token, because tokens are
written one at a time: a scale for a block would requantise it whenever a later token is larger, so that its content
would depend on how a prompt was cut, and no block would be final until full. By head, because magnitudes of keys differ
between heads by far more than 256 codes can express. The error is at most half a code: peak / 254.

fp8_e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022) is scaled by layer, K or V, and head, statically:
code = value / scale, rounded to three bits of fraction and held within +-448. The scale is the checkpoint's, or 1. The
error is at most 1/16 of the value, or 2^-10 of the scale below 2^-6 of it.
"""

import torch
from torch import Tensor

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest magnitude of a code, by eight-bit dtype."""

SMALLEST_PEAK = 1e-30
"""Peak below which a vector becomes zeros: 127 / peak must stay finite."""


def token_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of finite `[..., head_dim]`, and their float32 scales `[...]`."""
    largest = LARGEST_CODE[torch.int8]
    values = values.float()
    peak = values.abs().amax(-1)
    # Divides a tensor by a tensor: torch turns `largest / peak` into a product with the reciprocal, rounded twice.
    quotient = torch.full_like(peak, largest) / peak.clamp_min(SMALLEST_PEAK)
    factor = torch.where(peak > SMALLEST_PEAK, quotient, torch.zeros_like(peak))
    codes = (values * factor[..., None]).round_().clamp_(-largest, largest)
    return codes.to(torch.int8), peak / largest


def head_codes(values: Tensor, scales: Tensor) -> Tensor:
    """fp8_e4m3 codes of finite `[..., head_dim]` under float32 scales that broadcast to `[...]`."""
    largest = LARGEST_CODE[torch.float8_e4m3fn]
    # Clamped first: torch converts values beyond the format to NaN.
    return (values.float() / scales[..., None]).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of codes `[..., head_dim]` under scales that broadcast to `[...]`: multiplied in float32, then rounded."""
    return (codes.float() * scales[..., None]).to(dtype)
