"""A batch-invariant linear layer: every row is summed in one order, regardless of the number of rows.

Libraries choose tiles and splits of the depth by the number of rows, so a token's result depends on its batch. Here
tiles are fixed and one program sums the depth from front to back. A single row costs a whole tile of rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.tuning import GemmLaunch

_ROW_TILES_TOGETHER = 8


@triton.jit(do_not_specialize=["num_rows"])
def gemm_fixed_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    OUT: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the product; tiles that share weights run together, so that these are cached."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(OUT, BLOCK_N)
    program = tl.program_id(0)
    first = program // (TOGETHER * column_tiles) * TOGETHER
    height = tl.minimum(row_tiles - first, TOGETHER)
    within = program % (TOGETHER * column_tiles)
    rows = ((first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (within // height * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * x_stride + depth[None, :]
    weight_ptrs = weight_ptr + columns[:, None] * DEPTH + depth[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, DEPTH, BLOCK_K):
        inside = (begin + depth < DEPTH)[None, :]
        x = tl.load(x_ptrs + begin, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        weight = tl.load(weight_ptrs + begin, mask=(columns < OUT)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < OUT)[None, :]
    tl.store(out_ptr + rows[:, None] * OUT + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def gemm_fixed(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, launch: GemmLaunch) -> None:
    """Write `x @ weight.T + bias` to contiguous `[num_rows, out_features]` of any float dtype, rounded from float32
    sums.

    x: `[num_rows, in_features]`, rows at any stride; weight: contiguous `[out_features, in_features]`.
    """
    num_rows, depth = x.shape
    features = weight.shape[0]
    if not num_rows:
        return
    grid = -(-num_rows // launch.block_m) * -(-features // launch.block_n)
    gemm_fixed_kernel[(grid,)](
        x,
        weight,
        bias,
        out,
        num_rows,
        x.stride(0),
        OUT=features,
        DEPTH=depth,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        TOGETHER=_ROW_TILES_TOGETHER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
