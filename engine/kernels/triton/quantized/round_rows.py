"""Rounds rows to eight bits, each in units of its largest magnitude over 127, for products of bytes."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.pages import power_of_two

_MOST_BLOCK = 4096


@triton.jit
def round_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, x_stride, DEPTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Round one row; what it reads twice is cached."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    peaks = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, DEPTH, BLOCK):
        x = tl.load(x_ptr + row * x_stride + begin + columns, mask=begin + columns < DEPTH, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(x.to(tl.float32)))
    peak = tl.max(peaks, 0)
    tl.store(scale_ptr + row, tl.div_rn(peak, 127.0))
    factor = tl.where(peak > 1e-30, tl.div_rn(127.0, tl.maximum(peak, 1e-30)), 0.0)
    for begin in tl.range(0, DEPTH, BLOCK):
        mask = begin + columns < DEPTH
        x = tl.load(x_ptr + row * x_stride + begin + columns, mask=mask, other=0.0).to(tl.float32) * factor
        # Adding 1.5 * 2^23 leaves no bits for a fraction, so the addition rounds, ties to even, on every device.
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
        tl.store(codes_ptr + row * DEPTH + begin + columns, x.to(tl.int8), mask=mask)


def round_rows(x: Tensor, codes: Tensor, scale: Tensor, *, pdl: bool = False) -> None:
    """Round `[num_rows, depth]` of any float dtype and row stride into contiguous int8 `codes` of its shape.

    scale: float32 `[num_rows]`, what a code of one stands for. pdl: start while the kernel before ends, which `x` may
    be written by.
    """
    num_rows, depth = x.shape
    if num_rows:
        round_rows_kernel[(num_rows,)](
            x,
            codes,
            scale,
            x.stride(0),
            DEPTH=depth,
            BLOCK=min(_MOST_BLOCK, power_of_two(depth, 16)),
            PDL=pdl,
            num_warps=8 if depth > 1024 else 4,
            launch_pdl=pdl,
        )
