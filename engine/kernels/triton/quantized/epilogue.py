"""Programs of a product of quantized weights: which tile each computes, and how its sums are stored."""

import triton
import triton.language as tl

from engine.kernels.triton.gemm_few import sum_of_parts

ROW_TILES_TOGETHER = 8
"""Tiles of rows that run one after another over the same weights, which are cached then."""


@triton.jit
def tile_of(num_rows, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr):
    """Rows and features of this program, `[BLOCK_M]` and `[BLOCK_N]`; either may lie beyond the last."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(OUT, BLOCK_N)
    program = tl.program_id(0)
    first = program // (TOGETHER * column_tiles) * TOGETHER
    height = tl.minimum(row_tiles - first, TOGETHER)
    within = program % (TOGETHER * column_tiles)
    rows = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows.to(tl.int64), within // height * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def gate_rounded(gate, up, dtype: tl.constexpr):
    """SwiGLU of two products, each rounded as one that is stored would be; float32."""
    gate = gate.to(dtype).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)


@triton.jit
def whole_sum(acc, parts_ptr, arrivals_ptr, OUT: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The sum of a tile's parts, in whichever program is last, and how many features that one is to store: OUT. Of the
    others, no sum and 0.
    """
    num_stored = OUT
    if NUM_SPLITS > 1:
        acc, is_last = sum_of_parts(acc, parts_ptr, arrivals_ptr, tl.program_id(0), tl.program_id(1), NUM_SPLITS)
        num_stored = tl.where(is_last, OUT, 0)
    return acc, num_stored


@triton.jit
def store_product(acc, rows, columns, num_rows, num_stored, bias_ptr, residual_ptr, out_ptr, OUT: tl.constexpr):
    """Store a tile of sums, float32 `[BLOCK_N, BLOCK_M]`, of the first `num_stored` features."""
    dtype = out_ptr.dtype.element_ty
    mask = (columns < num_stored)[:, None] & (rows < num_rows)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < OUT, other=0.0).to(tl.float32)[:, None]
    where = rows[None, :] * OUT + columns[:, None]
    if residual_ptr is not None:
        acc = acc.to(dtype).to(tl.float32) + tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, acc.to(dtype), mask=mask)
