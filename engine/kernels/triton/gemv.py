"""A linear layer for one row, by plain arithmetic: weights go from memory into registers.

Tensor cores have nothing to do for one row but to wait for their tiles. Here a program holds one tile of weights while
it asks for the next, keeps a sum per thread, and adds these up at the end. It needs no shared memory, so programs of
the next kernel find room beside it; with programmatic dependent launch each asks for its first tile before it waits.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.tuning import OneRowLaunch

_LANE = tl.constexpr(8)
"""Neighbouring weights of one thread: sixteen bytes of a 16-bit dtype."""


@triton.jit
def _sums(weight, x):
    """Products of a tile `[BLOCK_N, BLOCK_K]` and its part of the row, summed within each thread."""
    product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(product, (weight.shape[0], weight.shape[1] // _LANE, _LANE)), 2)


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    OUT: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N features over the whole depth, a multiple of BLOCK_K."""
    columns, depth = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Of the last tile, features that do not exist read the last one's weights; only existing ones are stored.
    weight_ptrs = weight_ptr + tl.minimum(columns, OUT - 1).to(tl.int64)[:, None] * DEPTH + depth[None, :]
    weight = tl.load(weight_ptrs)
    if GATED:
        upper = tl.load(weight_ptrs + OUT * DEPTH)
    wait_for_previous(PDL)
    sums, upper_sums = (
        tl.zeros([BLOCK_N, BLOCK_K // _LANE], tl.float32),
        tl.zeros([BLOCK_N, BLOCK_K // _LANE], tl.float32),
    )
    for k in tl.range(0, DEPTH - BLOCK_K, BLOCK_K, num_stages=1):
        x = tl.load(x_ptr + k + depth)
        coming = tl.load(weight_ptrs + k + BLOCK_K)
        if GATED:
            coming_upper = tl.load(weight_ptrs + OUT * DEPTH + k + BLOCK_K)
            upper_sums += _sums(upper, x)
            upper = coming_upper
        sums += _sums(weight, x)
        weight = coming
    x = tl.load(x_ptr + DEPTH - BLOCK_K + depth)
    dtype = out_ptr.dtype.element_ty
    result = tl.sum(sums + _sums(weight, x), 1)
    if GATED:
        gate = result.to(dtype).to(tl.float32)  # rounded, as a product that is stored would be
        result = gate * tl.sigmoid(gate) * tl.sum(upper_sums + _sums(upper, x), 1).to(dtype).to(tl.float32)
    mask = columns < OUT
    if bias_ptr is not None:
        result += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        result = result.to(dtype).to(tl.float32) + tl.load(residual_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, result.to(dtype), mask=mask)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: OneRowLaunch,
    *,
    residual: Tensor | None = None,
    is_gated: bool = False,
    pdl: bool = False,
) -> None:
    """Do what `gemm_few` does, for one row whose depth is a multiple of `launch.block_k`.

    x: contiguous `[1, in_features]`.
    """
    features = out.shape[1]
    gemv_kernel[(-(-features // launch.block_n),)](
        x,
        weight,
        bias,
        residual,
        out,
        OUT=features,
        DEPTH=x.shape[1],
        GATED=is_gated,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
    )
