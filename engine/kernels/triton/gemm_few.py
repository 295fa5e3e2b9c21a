"""A linear layer for few rows, as when decoding: it takes the time of reading the weights once.

A program computes some output features of all rows. Weights are the left operand, which tensor cores want large, and
the rows the right one, padded to 16. Where there are too few features to occupy the GPU, the depth is split among
programs: each writes its part, and whoever is last adds all of them, in their order, so results do not depend on
who that was. The gate of SwiGLU and the residual addition are computed on the way out.

With programmatic dependent launch a program fetches its first weights before it waits for its rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import LINE_BYTES, prefetch_lines, wait_for_previous
from engine.kernels.triton.tuning import FewRowsLaunch

MAX_ROWS = 16
"""Most rows: the narrowest tile of tensor cores. More rows are left to the vendor's library."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FewRowsWorkspace:
    """Parts of a product until they are added; kernels that run one after another may share it."""

    parts: Tensor  # float32 [largest size of all parts]
    arrivals: Tensor  # int32 [most tiles], zeros between kernels

    @classmethod
    def allocate(cls, num_values: int, num_tiles: int, device: torch.device | str) -> "FewRowsWorkspace":
        return cls(
            parts=torch.empty(num_values, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )


@triton.jit
def sum_of_parts(acc, parts_ptr, arrivals_ptr, tile, split, NUM_SPLITS: tl.constexpr):
    """Leave this program's part; the last one returns the sum of all, others what must not be used."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    size: tl.constexpr = BLOCK_N * BLOCK_M
    first = parts_ptr + tile.to(tl.int64) * NUM_SPLITS * size
    tl.store(first + split * size + place, acc)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        tl.debug_barrier()
        acc = tl.zeros([BLOCK_N, BLOCK_M], acc.dtype)
        for part in tl.static_range(NUM_SPLITS):
            acc += tl.load(first + part * size + place, cache_modifier=".cg")
        tl.store(arrivals_ptr + tile, 0)
    return acc, is_last


@triton.jit(do_not_specialize=["num_rows"])
def gemm_few_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, parts_ptr, arrivals_ptr, num_rows, x_stride,
    OUT: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N features of all rows over one part of the depth, a multiple of BLOCK_K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    SPAN: tl.constexpr = tl.cdiv(DEPTH, NUM_SPLITS * BLOCK_K) * BLOCK_K
    begin = split * SPAN
    columns, rows, depth = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    # Of the last tile, features that do not exist read the last one's weights; only existing ones are stored.
    weight_rows = weight_ptr + tl.minimum(columns, OUT - 1).to(tl.int64)[:, None] * DEPTH
    if LINES > 0:
        lines = begin + tl.arange(0, LINES) * (LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth)
        lines = tl.minimum(lines, DEPTH - 1)[None, :]
        prefetch_lines(weight_rows + lines)
        if GATED:
            prefetch_lines(weight_rows + OUT * DEPTH + lines)
    wait_for_previous(PDL)
    is_row = rows < num_rows
    weight_ptrs = weight_rows + depth[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + depth[None, :]
    acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(begin, tl.minimum(begin + SPAN, DEPTH), BLOCK_K):
        weight = tl.load(weight_ptrs + k)
        x = tl.trans(tl.load(x_ptrs + k, mask=is_row[:, None], other=0.0))
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(tl.load(weight_ptrs + OUT * DEPTH + k), x, up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    if GATED:
        gate = acc.to(dtype).to(tl.float32)  # rounded, as a product that is stored would be
        acc = gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)
    num_stored = OUT
    if NUM_SPLITS > 1:
        acc, is_last = sum_of_parts(acc, parts_ptr, arrivals_ptr, tile, split, NUM_SPLITS)
        num_stored = tl.where(is_last, OUT, 0)
    mask = (columns < num_stored)[:, None] & is_row[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < OUT, other=0.0).to(tl.float32)[:, None]
    where = rows.to(tl.int64)[None, :] * OUT + columns[:, None]
    if residual_ptr is not None:
        acc = acc.to(dtype).to(tl.float32) + tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, acc.to(dtype), mask=mask)


def gemm_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: FewRowsLaunch,
    *,
    residual: Tensor | None = None,
    workspace: FewRowsWorkspace | None = None,
    is_gated: bool = False,
    pdl: bool = False,
) -> None:
    """Write `x @ weight.T + bias` to contiguous `[num_rows, out_features]` of any float dtype, for up to MAX_ROWS rows.

    x: `[num_rows, in_features]`, rows at any stride; weight: contiguous `[out_features, in_features]`, whose depth is a
    multiple of `launch.block_k`. residual: `[num_rows, out_features]`, added to the rounded product; may be `out`
    itself. is_gated: `weight` is gate above up, each `[out_features, in_features]`, and the result silu(gate) * up;
    without bias, residual and splits. workspace: for `launch.num_splits` above one. pdl: start while the kernel before
    ends, which `x` and `residual` may be written by, and `weight` and `bias` may not.
    """
    num_rows, depth = x.shape
    features = out.shape[1]
    if not num_rows:
        return
    tiles = -(-features // launch.block_n)
    parts, arrivals = (workspace.parts, workspace.arrivals) if workspace else (None, None)
    gemm_few_kernel[(tiles, launch.num_splits)](
        x,
        weight,
        bias,
        residual,
        out,
        parts,
        arrivals,
        num_rows,
        x.stride(0),
        OUT=features,
        DEPTH=depth,
        GATED=is_gated,
        NUM_SPLITS=launch.num_splits,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        LINES=launch.prefetch_lines if pdl else 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
