"""Keys and values as codes of eight or four bits: the reference that every backend's kernels are compared with.

int8 is scaled by token and head, dynamically: code = round(value * 127 / peak), ties to even, where peak is the largest
magnitude of the head's vector, and the scale stored beside the codes is peak / 127. By token, because tokens are
written one at a time: a scale for a block would requantise it whenever a later token is larger, so that its content
would depend on how a prompt was cut, and no block would be final until full. By head, because magnitudes of keys differ
between heads by far more than 256 codes can express. The error is at most half a code: peak / 254.

int4 is scaled by token, head and group of 64 values, from a minimum: code = round((value - minimum) / step), 0 to 15,
where the minimum is the group's smallest value and the step a fifteenth of its range, both rounded to bfloat16 and
stored beside the codes. With a minimum, because values of one token lie around anything but zero more often than not,
and one of 16 codes is too many to waste. In bfloat16 both fit in the word that int8 has for its scale, and a restored
value is exact but for one rounding, so that kernels agree to the bit. Two codes share a byte, the first in its lower
half. The error is at most half a step, range / 30, and what rounding the minimum costs: 1/512 of it, as in bfloat16.

fp8_e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022) is scaled by layer, K or V, and head, statically:
code = value / scale, rounded to three bits of fraction and held within +-448. The scale is the checkpoint's, or 1. The
error is at most 1/16 of the value, or 2^-10 of the scale below 2^-6 of it.
"""

import torch
from torch import Tensor

from tandem.values.kv_layout import INT4_GROUP

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest magnitude of a code, by eight-bit dtype."""

SMALLEST_PEAK = 1e-30
"""Peak below which a vector becomes zeros: 127 / peak must stay finite. Least step and minimum of int4 but 0."""

_LARGEST_INT4 = 15.0
_LARGEST_MINIMUM = torch.finfo(torch.bfloat16).max


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


def group_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """int4 codes of finite `[..., head_dim]`, uint8 `[..., head_dim / 2]`, and bfloat16 `[..., num_groups, 2]`: the
    step between codes and the value of code 0. `head_dim` must be even.
    """
    codes, scales = [], []
    for group in torch.split(values.float(), INT4_GROUP, -1):
        low = group.amin(-1).clamp_(-_LARGEST_MINIMUM, _LARGEST_MINIMUM)
        low = torch.where(low.abs() > SMALLEST_PEAK, low, 0.0).bfloat16().float()
        step = group.amax(-1) / _LARGEST_INT4 - low / _LARGEST_INT4
        step = torch.where(step > SMALLEST_PEAK, step, 0.0).bfloat16().float()
        factor = torch.where(step > 0.0, torch.ones_like(step) / step.clamp_min(SMALLEST_PEAK), 0.0)
        scaled = (group - low[..., None]).mul_(factor[..., None])
        codes.append(scaled.round_().clamp_(0.0, _LARGEST_INT4).to(torch.uint8))
        scales.append(torch.stack((step, low), -1))
    every = torch.cat(codes, -1)
    return every[..., ::2] | every[..., 1::2] << 4, torch.stack(scales, -2).bfloat16()


def head_codes(values: Tensor, scales: Tensor) -> Tensor:
    """fp8_e4m3 codes of finite `[..., head_dim]` under float32 scales that broadcast to `[...]`."""
    largest = LARGEST_CODE[torch.float8_e4m3fn]
    # Clamped first: torch converts values beyond the format to NaN.
    return (values.float() / scales[..., None]).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of codes `[..., head_dim]` under scales that broadcast to `[...]`: multiplied in float32, then rounded.

    Codes in uint8 are those of int4, with their scales.
    """
    if codes.dtype is torch.uint8:
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float()
        for group, scale in zip(torch.split(values, INT4_GROUP, -1), scales.float().unbind(-2), strict=True):
            group.mul_(scale[..., :1]).add_(scale[..., 1:])
        return values.to(dtype)
    return (codes.float() * scales[..., None]).to(dtype)
