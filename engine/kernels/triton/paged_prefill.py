"""Causal attention of many rows over the paged cache, whose newest keys are the rows' own: ragged, in one launch.

A program computes a tile of BLOCK_M rows: as many consecutive tokens of one sequence as fit, times the query heads that
share one key-value head, so that keys are read once for all of them. A program's sequence is found by
bisection over the row starts, on the device: sequence `i` owns tiles from `row_starts[i] // tokens_per_tile + i` on,
an upper bound that needs no prefix sum; surplus programs, and those of rows before the first sequence's, return at
once. Long tiles of a sequence start first, each for all heads, so that short ones of all heads are the last to run.

Keys that every row of a tile attends to are computed without a mask, the rest with one. With `fixed_keys`, results do
not depend on chunking: runs of that many keys, at absolute positions, are computed from an empty state, masked
throughout, and merged in order, as `engine.kernels.triton.flash_decode` does with the same `fixed_keys`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.attention_tiles import attend_keys, empty_state, first_key_of, merge_states
from engine.kernels.triton.pages import LayerPages, power_of_two
from engine.kernels.triton.tuning import PrefillLaunch


@triton.jit
def _sequence_of(tile, row_starts_ptr, num_seqs, TOKENS: tl.constexpr):
    """Index of the last sequence whose first tile is not after `tile`; 0 for a tile before all."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(row_starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit
def _attend_tile(
    queries, positions, pages_ptr, scales_ptr, table_ptr, kv_head, first, end, score_scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, FIXED_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The state of a tile whose first row is at position `first` and whose last key is before `end`."""
    BLOCK_M: tl.constexpr = queries.shape[0]
    BLOCK_D: tl.constexpr = queries.shape[1]
    state = empty_state(BLOCK_M, BLOCK_D)
    begin = first_key_of(first, WINDOW, BLOCK_N)
    if FIXED_KEYS > 0:
        for run in tl.range(begin // FIXED_KEYS * FIXED_KEYS, end, FIXED_KEYS):
            part = attend_keys(
                empty_state(BLOCK_M, BLOCK_D), queries, positions, pages_ptr, scales_ptr, table_ptr, kv_head,
                tl.maximum(run, begin), tl.minimum(run + FIXED_KEYS, end), score_scale,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, True, SOFT_CAP,
            )  # fmt: skip
            state = merge_states(state, part)
        return state
    else:
        if WINDOW == 0:
            shared = (first + 1) // BLOCK_N * BLOCK_N
            state = attend_keys(
                state, queries, positions, pages_ptr, scales_ptr, table_ptr, kv_head, begin, shared, score_scale,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, False, SOFT_CAP,
            )  # fmt: skip
            begin = shared
        return attend_keys(
            state, queries, positions, pages_ptr, scales_ptr, table_ptr, kv_head, begin, end, score_scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, True, SOFT_CAP,
        )  # fmt: skip


# The alignment of a step's arrays and the width of its tables change from step to step: with a kernel compiled for each
# combination of multiples of 16, requests would have to wait for the compiler.
@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "row_starts_ptr", "starts_ptr"],
)
def paged_prefill_kernel(
    queries_ptr, pages_ptr, scales_ptr, head_scales_ptr, out_ptr, tables_ptr, row_starts_ptr, starts_ptr,
    query_stride, out_stride, table_stride, num_seqs, score_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, WINDOW: tl.constexpr, FIXED_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    sequence = _sequence_of(tile, row_starts_ptr, num_seqs, TOKENS)
    first_row = tl.load(row_starts_ptr + sequence)
    count = tl.load(row_starts_ptr + sequence + 1) - first_row
    first_token = (tile - first_row // TOKENS - sequence) * TOKENS
    if (first_token < 0) | (first_token >= count):
        return
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + lanes // GROUP
    head = kv_head * GROUP + lanes % GROUP
    valid = (lanes < TOKENS * GROUP) & (token < count)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    columns = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(queries_ptr + row[:, None] * query_stride + columns, mask=mask, other=0.0)
    start = tl.load(starts_ptr + sequence)
    if head_scales_ptr is not None:
        score_scale *= tl.load(head_scales_ptr + kv_head)
    _, total, acc = _attend_tile(
        queries, tl.where(valid, start + token, -1), pages_ptr, scales_ptr,
        tables_ptr + sequence.to(tl.int64) * table_stride, kv_head,
        start + first_token, start + tl.minimum(first_token + TOKENS, count), score_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, FIXED_KEYS, BLOCK_N, SOFT_CAP,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    # With fixed keys rounded as decode attention rounds it, else by one division for each row.
    result = acc / total[:, None] if FIXED_KEYS > 0 else acc * (1.0 / total)[:, None]
    if head_scales_ptr is not None:
        result *= tl.load(head_scales_ptr + NUM_KV_HEADS + kv_head)
    tl.store(out_ptr + row[:, None] * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    queries: Tensor,
    layer: LayerPages,
    out: Tensor,
    *,
    tables: Tensor,
    row_starts: Tensor,
    starts: Tensor,
    window: int | None,
    launch: PrefillLaunch,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend the rows of `num_seqs` sequences, whose own keys are in the cache already; fills `out` and nothing else.

    queries: `[num_rows, num_heads, head_dim]`, heads contiguous, rows at any stride; out: likewise.
    tables: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are never read.
    row_starts: int32 `[num_seqs + 1]`, cumulative; equal neighbours are a sequence without rows.
    starts: int32 `[num_seqs]`, the position of each sequence's first row.
    scale: factor on products of queries and keys; None: `head_dim ** -0.5`. soft_cap: bound that they are then bent to.
    Rows before `row_starts[0]` and from `row_starts[num_seqs]` on belong to no sequence and are not written.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_seqs = starts.shape[0]
    if not num_rows or not num_seqs:
        return
    group = num_heads // layer.num_kv_heads
    block_m = max(launch.block_m, power_of_two(group, 16))
    paged_prefill_kernel[((num_rows // (block_m // group) + num_seqs) * layer.num_kv_heads,)](
        queries, layer.pages, layer.token_scales, layer.head_scales, out, tables, row_starts, starts,
        queries.stride(0), out.stride(0), tables.stride(0), num_seqs, score_scale(head_dim, scale),
        GROUP=group,
        NUM_KV_HEADS=layer.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=layer.block_size,
        BLOCK_STRIDE=layer.block_stride,
        SCALE_STRIDE=layer.scale_stride,
        WINDOW=window or 0,
        FIXED_KEYS=launch.fixed_keys,
        BLOCK_M=block_m,
        BLOCK_N=launch.block_n,
        BLOCK_D=power_of_two(head_dim, 16),
        SOFT_CAP=base_two(soft_cap),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=not launch.fixed_keys,
    )  # fmt: skip


def score_scale(head_dim: int, scale: float | None = None) -> float:
    """Factor that turns a product of query and key into an exponent of two; `scale`: None for `head_dim ** -0.5`."""
    return math.log2(math.e) / math.sqrt(head_dim) if scale is None else math.log2(math.e) * scale


def base_two(soft_cap: float | None) -> float:
    """The bound of exponents of two that belongs to a bound of scores; 0 for none."""
    return 0.0 if soft_cap is None else math.log2(math.e) * soft_cap


def row_starts_of(counts: Tensor) -> Tensor:
    """Cumulative int32 `[num_seqs + 1]` of int32 `[num_seqs]` counts."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
