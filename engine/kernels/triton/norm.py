"""Residual addition and RMSNorm (Zhang and Sennrich, 2019) in one pass: each row is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.pages import power_of_two


@triton.jit
def add_rms_norm_kernel(
    residual_ptr, delta_ptr, weight_ptr, out_ptr, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one row; one program sums it in one order, whatever the number of rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(residual_ptr + row * SIZE + columns, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)  # rounded: the sum that the next layer will read
        tl.store(residual_ptr + row * SIZE + columns, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + columns, (wide * scale * weight).to(x.dtype), mask=mask)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, *, pdl: bool = False
) -> None:
    """Add `delta` to `residual` in place, then write its norm times `weight` to `out`; all `[num_rows, size]`.

    residual and out are contiguous; delta may have any row stride. Sums are float32. pdl: start while the kernel before
    ends, which must not write `weight`.
    """
    num_rows, size = residual.shape
    if not num_rows:
        return
    block = power_of_two(size)
    stride = 0 if delta is None else delta.stride(0)
    warps = min(16, max(1, block // 512))
    add_rms_norm_kernel[(num_rows,)](
        residual, delta, weight, out, stride, eps, SIZE=size, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )  # fmt: skip
