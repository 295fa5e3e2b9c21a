"""A linear layer of 16-bit rows and weights of four or eight bits with scales by groups of columns (W4A16, W8A16).

Codes become numbers of the rows' dtype in registers, without their scale: a code's distance from its zero, or an E4M3
number, is exact in any of them. Tensor cores multiply them, and the sum of each group is scaled in float32: finer than
rounding scaled weights, and far fewer multiplications. Weights are the left operand, which tensor cores take from
registers, so codes are never written back; few rows are padded to 16, many are tiles of their own.

Few rows take the time of reading the packed weights once. Where there are too few features to occupy the GPU, the depth
is split among programs, as `gemm_few` does it. Each element is summed in an order that depends on the launch alone: one
launch for any number of rows makes results independent of the batch.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import LINE_BYTES, prefetch_lines, wait_for_previous
from engine.kernels.triton.gemm_few import FewRowsWorkspace
from engine.kernels.triton.quantized.epilogue import ROW_TILES_TOGETHER, gate_rounded, store_product, tile_of, whole_sum
from engine.kernels.triton.quantized.group_weights import GroupWeights
from engine.kernels.triton.tuning import QuantizedLaunch


@triton.jit
def _zeros(zero_ptr, where, dtype: tl.constexpr, BITS: tl.constexpr):
    """What `_numbers` subtracts for the features at `where`: their zeros, as it needs them."""
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + where).to(tl.int16)
    else:
        zero = tl.full(where.shape, 1 << (BITS - 1), tl.int16)
    if BITS == 4 and dtype == tl.float16:
        zero = (zero + 1024).to(dtype)
    if BITS == 4 and dtype == tl.bfloat16:
        zero = (zero + 128).to(dtype)
    return zero[:, None]


@triton.jit
def _numbers(words, zero, part: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """One part's weights without scale, exact in `dtype`; `words`: int16 `[BLOCK_N, LANES]`."""
    codes = (words >> (BITS * part)) & ((1 << BITS) - 1)
    if IS_FLOAT:
        # E4M3's fields moved into half precision's, whose exponent is 2^8 less for the same bits: no GPU lacks this.
        half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = half * 256.0
    # As the lowest bits of 1024, or of 128, a code is added to it, without a conversion.
    elif BITS == 4 and dtype == tl.float16:
        numbers = (codes | 0x6400).to(dtype, bitcast=True) - zero
    elif BITS == 4 and dtype == tl.bfloat16:
        numbers = (codes | 0x4300).to(dtype, bitcast=True) - zero
    else:
        numbers = codes - zero
    return numbers.to(dtype)


@triton.jit
def _group_sums(
    words, x_ptrs, is_row, depth, scale_ptr, zero_ptr, offset_ptr, where,
    FIRST: tl.constexpr, COUNT: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, LANES: tl.constexpr, IS_FLOAT: tl.constexpr, IS_RAGGED: tl.constexpr,
):  # fmt: skip
    """Scaled products of COUNT parts of a span from FIRST on, which are in one group; float32 `[BLOCK_N, BLOCK_M]`.

    x_ptrs, depth: of the span's first part, `[BLOCK_M, LANES]` and `[LANES]`; where: the group's scales.
    """
    zero = _zeros(zero_ptr, where, DTYPE, BITS)
    sums = tl.zeros([words.shape[0], x_ptrs.shape[0]], tl.float32)
    row_sums = tl.zeros([x_ptrs.shape[0]], tl.float32)
    for part in tl.static_range(FIRST, FIRST + COUNT):
        mask = is_row[:, None]
        if IS_RAGGED:
            mask = mask & (depth + part * LANES < DEPTH)[None, :]
        x = tl.load(x_ptrs + part * LANES, mask=mask, other=0.0)
        sums = tl.dot(_numbers(words, zero, part, DTYPE, BITS, IS_FLOAT), tl.trans(x), sums, input_precision="ieee")
        if offset_ptr is not None:
            row_sums += tl.sum(x.to(tl.float32), 1)
    sums = sums * tl.load(scale_ptr + where).to(tl.float32)[:, None]
    if offset_ptr is not None:
        sums += tl.load(offset_ptr + where)[:, None] * row_sums[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def group_gemm_kernel(
    x_ptr, words_ptr, scale_ptr, zero_ptr, offset_ptr, bias_ptr, residual_ptr, out_ptr, parts_ptr, arrivals_ptr,
    num_rows, x_stride,
    OUT: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr,
    IS_FLOAT: tl.constexpr, GATED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N features of BLOCK_M rows over one part of the depth, whole spans."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = PARTS * LANES
    SPANS: tl.constexpr = (DEPTH + SPAN - 1) // SPAN  # of constants `tl.cdiv` makes none before triton 3.9
    GROUPS: tl.constexpr = (SPAN + GROUP - 1) // GROUP  # of a span
    EACH: tl.constexpr = PARTS // GROUPS
    ROWS: tl.constexpr = OUT * 2 if GATED else OUT
    rows, columns = tile_of(num_rows, OUT, BLOCK_M, BLOCK_N, TOGETHER)
    # Of the last tile, features that do not exist read the last one's weights; only existing ones are stored.
    features, lanes = tl.minimum(columns, OUT - 1), tl.arange(0, LANES)
    word_rows = words_ptr + features.to(tl.int64)[:, None] * (SPANS * LANES)
    PER_SPLIT: tl.constexpr = (SPANS + NUM_SPLITS - 1) // NUM_SPLITS
    begin = tl.program_id(1) * PER_SPLIT
    if LINES > 0:
        lines = begin * LANES + tl.arange(0, LINES) * (LINE_BYTES // 2)
        lines = tl.minimum(lines, SPANS * LANES - 1)[None, :]
        prefetch_lines(word_rows + lines)
        if GATED:
            prefetch_lines(word_rows + OUT * SPANS * LANES + lines)
    wait_for_previous(PDL)
    is_row = rows < num_rows
    x_rows = x_ptr + rows[:, None] * x_stride + lanes[None, :]
    acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for span in tl.range(begin, tl.minimum(begin + PER_SPLIT, SPANS)):
        words = tl.load(word_rows + span * LANES + lanes[None, :])
        if GATED:
            upper = tl.load(word_rows + OUT * SPANS * LANES + span * LANES + lanes[None, :])
        for group in tl.static_range(GROUPS):
            where = (span * SPAN + group * EACH * LANES) // GROUP * ROWS + features
            acc += _group_sums(
                words, x_rows + span * SPAN, is_row, span * SPAN + lanes, scale_ptr, zero_ptr, offset_ptr, where,
                group * EACH, EACH, DEPTH, DTYPE, BITS, LANES, IS_FLOAT, DEPTH % SPAN != 0,
            )  # fmt: skip
            if GATED:
                up += _group_sums(
                    upper, x_rows + span * SPAN, is_row, span * SPAN + lanes, scale_ptr, zero_ptr, offset_ptr,
                    where + OUT, group * EACH, EACH, DEPTH, DTYPE, BITS, LANES, IS_FLOAT, DEPTH % SPAN != 0,
                )  # fmt: skip
    if GATED:
        acc = gate_rounded(acc, up, out_ptr.dtype.element_ty)
    acc, num_stored = whole_sum(acc, parts_ptr, arrivals_ptr, OUT, NUM_SPLITS)
    store_product(acc, rows, columns, num_rows, num_stored, bias_ptr, residual_ptr, out_ptr, OUT)


def group_gemm(
    x: Tensor,
    weights: GroupWeights,
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
    """Write `x @ weights.T + bias` to contiguous `[num_rows, out_features]` of any float dtype.

    x: `[num_rows, in_features]`, rows at any stride, columns in the order of `weights`. residual: `[num_rows,
    out_features]`, added to the rounded product; may be `out` itself. is_gated: `weights` are gate above up, each of
    `out_features` rows, and the result silu(gate) * up; without bias, residual and splits. num_splits: parts of the
    depth, above one with a workspace for all tiles. pdl: start while the kernel before ends, which `x` and `residual`
    may be written by, and `weights` and `bias` may not.
    """
    num_rows, depth = x.shape
    features = out.shape[1]
    if not num_rows:
        return
    tiles = -(-num_rows // launch.block_m) * -(-features // launch.block_n)
    parts, arrivals = (workspace.parts, workspace.arrivals) if workspace and num_splits > 1 else (None, None)
    group_gemm_kernel[(tiles, num_splits)](
        x,
        weights.words,
        weights.scale,
        weights.zero,
        weights.offset,
        bias,
        residual,
        out,
        parts,
        arrivals,
        num_rows,
        x.stride(0),
        OUT=features,
        DEPTH=depth,
        GROUP=weights.group_size,
        BITS=weights.bits,
        LANES=weights.lanes,
        IS_FLOAT=weights.is_float,
        GATED=is_gated,
        NUM_SPLITS=num_splits,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        TOGETHER=ROW_TILES_TOGETHER,
        LINES=launch.prefetch_lines if pdl else 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
