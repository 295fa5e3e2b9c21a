"""A linear layer of rows and weights that are both signed bytes (W8A8): a scale for each row and for each feature.

Products and their sums are integers, so they are exact in any order: tiles and splits change nothing. The one float
number per element is scaled twice and rounded once. Weights are the left operand, as in `group_gemm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import LINE_BYTES, prefetch_lines, wait_for_previous
from engine.kernels.triton.gemm_few import FewRowsWorkspace
from engine.kernels.triton.quantized.epilogue import (
    ROW_TILES_TOGETHER,
    gate_rounded,
    store_product,
    tile_of,
    whole_sum,
)
from engine.kernels.triton.tuning import QuantizedLaunch


@triton.jit(do_not_specialize=["num_rows"])
def byte_gemm_kernel(
    codes_ptr, row_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, parts_ptr, arrivals_ptr, num_rows,
    OUT: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N features of BLOCK_M rows over one part of the depth, a multiple of BLOCK_K."""
    SPAN: tl.constexpr = (DEPTH + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    begin = tl.program_id(1) * SPAN
    rows, columns = tile_of(num_rows, OUT, BLOCK_M, BLOCK_N, TOGETHER)
    depth = tl.arange(0, BLOCK_K)
    # Of the last tile, features that do not exist read the last one's weights; only existing ones are stored.
    features = tl.minimum(columns, OUT - 1)
    weight_rows = weight_ptr + features.to(tl.int64)[:, None] * DEPTH
    if LINES > 0:
        lines = tl.minimum(begin + tl.arange(0, LINES) * LINE_BYTES, DEPTH - 1)[None, :]
        prefetch_lines(weight_rows + lines)
        if GATED:
            prefetch_lines(weight_rows + OUT * DEPTH + lines)
    wait_for_previous(PDL)
    is_row = rows < num_rows
    code_rows = codes_ptr + rows[:, None] * DEPTH
    acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.int32), tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for k in tl.range(begin, tl.minimum(begin + SPAN, DEPTH), BLOCK_K):
        inside = (k + depth < DEPTH)[None, :]
        codes = tl.trans(tl.load(code_rows + k + depth[None, :], mask=is_row[:, None] & inside, other=0))
        weight = tl.load(weight_rows + k + depth[None, :], mask=inside, other=0)
        acc = tl.dot(weight, codes, acc, out_dtype=tl.int32)
        if GATED:
            upper = tl.load(weight_rows + OUT * DEPTH + k + depth[None, :], mask=inside, other=0)
            up = tl.dot(upper, codes, up, out_dtype=tl.int32)
    total, num_stored = whole_sum(acc, parts_ptr, arrivals_ptr, OUT, NUM_SPLITS)
    row_scale = tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)[None, :]
    sums = total.to(tl.float32) * row_scale * tl.load(scale_ptr + features)[:, None]
    if GATED:
        values = up.to(tl.float32) * row_scale * tl.load(scale_ptr + OUT + features)[:, None]
        sums = gate_rounded(sums, values, out_ptr.dtype.element_ty)
    store_product(sums, rows, columns, num_rows, num_stored, bias_ptr, residual_ptr, out_ptr, OUT)


def byte_gemm(
    codes: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: QuantizedLaunch,
    *,
    residual: Tensor | None = None,
    workspace: FewRowsWorkspace | None = None,
    num_splits: int = 1,
    is_gated: bool = False,
    pdl: bool = False,
) -> None:
    """Write `(codes × row_scale) @ (weight × scale).T + bias` to contiguous `[num_rows, out_features]` of any float
    dtype.

    codes: contiguous int8 `[num_rows, in_features]`; row_scale: float32 `[num_rows]`; weight: contiguous int8 `[rows,
    in_features]`; scale: float32 `[rows]`. The others are those of `group_gemm`.
    """
    num_rows, depth = codes.shape
    features = out.shape[1]
    if not num_rows:
        return
    tiles = -(-num_rows // launch.block_m) * -(-features // launch.block_n)
    parts, arrivals = (None, None)
    if workspace is not None and num_splits > 1:
        parts, arrivals = workspace.parts.view(torch.int32), workspace.arrivals
    byte_gemm_kernel[(tiles, num_splits)](
        codes,
        row_scale,
        weight,
        scale,
        bias,
        residual,
        out,
        parts,
        arrivals,
        num_rows,
        OUT=features,
        DEPTH=depth,
        GATED=is_gated,
        NUM_SPLITS=num_splits,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        TOGETHER=ROW_TILES_TOGETHER,
        LINES=launch.prefetch_lines if pdl else 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
