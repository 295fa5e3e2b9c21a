"""Attention of one row per sequence, its keys split among programs: flash decoding (Dao et al., 2023).

A program computes all query heads that share a key-value head, over one part of one sequence; the last of them to end
merges the parts, in their order, so that no result depends on which it was. A step's launch depends only on the
batch's size and the most splits it may need: lengths are read on the device, and parts that a short sequence does not
need return at once. So a CUDA graph captured for a padded batch serves any lengths up to the longest it was captured
for; a sequence of length 0, padding, gets zeros.

`choose_splits` chooses the number of splits. A sequence is split on the device: evenly, in whole tiles, and at least
`min_keys` each. With `fixed_keys`: in runs of that many keys at absolute positions, merged one after another, so that
a row's result depends on neither batch nor step, and equals that of `engine.kernels.triton.paged_prefill` with the
same `fixed_keys`, `block_m` and `block_n`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.attention_tiles import attend_keys, empty_state, first_key_of, merge_states
from engine.kernels.triton.dependent_launch import LINE_BYTES, prefetch_lines, wait_for_previous
from engine.kernels.triton.paged_prefill import base_two, score_scale
from engine.kernels.triton.pages import LayerPages, power_of_two
from engine.kernels.triton.tuning import DecodeLaunch

_MAX_SPLITS = 64
_MERGED_AT_ONCE = 64
"""Parts, times query heads, that a merging program holds in registers together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWorkspace:
    """Memory for parts until they are merged: reused by every layer and step, so a graph may hold its address."""

    sums: Tensor  # float32 [batch, num_heads, num_splits, head_dim], weighted sums of values
    stats: Tensor  # float32 [batch, num_heads, num_splits, 2], largest exponent and total weight
    arrivals: Tensor  # int32 [batch, num_heads], zeros between kernels: parts that have ended, by key-value head

    @classmethod
    def allocate(
        cls, batch: int, num_heads: int, num_splits: int, head_dim: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Allocate memory for up to `batch` sequences in up to `num_splits` parts."""
        shape = (batch, num_heads, num_splits)
        return cls(
            sums=torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            stats=torch.empty(*shape, 2, dtype=torch.float32, device=device),
            arrivals=torch.zeros(batch, num_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _span(length, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr, WINDOW: tl.constexpr,
          BLOCK_N: tl.constexpr):  # fmt: skip
    """First key in view, beginning of the first part, keys per part, and number of parts."""
    first = first_key_of(length - 1, WINDOW, BLOCK_N)
    if FIXED_KEYS > 0:
        span = FIXED_KEYS
        origin = first // FIXED_KEYS * FIXED_KEYS
    else:
        even = tl.cdiv(tl.cdiv(length - first, NUM_SPLITS), BLOCK_N) * BLOCK_N
        span = tl.maximum(even, MIN_KEYS)
        origin = first
    return first, origin, span, tl.cdiv(length - origin, span)


@triton.jit
def _merged(
    sums_ptr, stats_ptr, first_head, num_parts,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, FIXED_KEYS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Total weights and weighted sums of values of a group of heads over all parts. Fixed runs are merged one after
    another, as in prefill; others several at a time.
    """
    heads, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    largest, total, acc = empty_state(BLOCK_G, BLOCK_D)
    if FIXED_KEYS > 0:
        known = heads < GROUP
        mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        for part in tl.range(0, num_parts):
            row = (first_head + heads) * NUM_SPLITS + part
            where = sums_ptr + row[:, None] * HEAD_DIM + dims[None, :]
            other = tl.load(where, mask=mask, other=0.0, cache_modifier=".cg")
            peak = tl.load(stats_ptr + row * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(stats_ptr + row * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
            largest, total, acc = merge_states((largest, total, acc), (peak, weight, other))
    else:
        for begin in tl.range(0, num_parts, BLOCK_S):
            parts = begin + tl.arange(0, BLOCK_S)
            row = (first_head + heads)[None, :] * NUM_SPLITS + parts[:, None]
            known = (parts < num_parts)[:, None] & (heads < GROUP)[None, :]
            mask = known[:, :, None] & (dims < HEAD_DIM)[None, None, :]
            where = sums_ptr + row[:, :, None] * HEAD_DIM + dims[None, None, :]
            others = tl.load(where, mask=mask, other=0.0, cache_modifier=".cg")
            peaks = tl.load(stats_ptr + row * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stats_ptr + row * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(largest, tl.max(peaks, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp2(peaks - base[None, :]), tl.exp2(largest - base)
            total = total * shrink + tl.sum(weights * totals, 0)
            acc = acc * shrink[:, None] + tl.sum(others * weights[:, :, None], 0)
            largest = higher
    return total, acc


@triton.jit
def _store_result(
    out_ptr, head_scales_ptr, total, acc, kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store the results of a group of heads in the row at `out_ptr`."""
    lanes, dims = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if head_scales_ptr is not None:
        result *= tl.load(head_scales_ptr + NUM_KV_HEADS + kv_head)
    where = out_ptr + (kv_head * GROUP + lanes)[:, None] * HEAD_DIM + dims[None, :]
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(where, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch_tile(
    pages_ptr, table_ptr, kv_head, begin, end,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Fetch LINES lines of memory of each key and value of a part's first tile."""
    keys = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    line = kv_head * BLOCK_SIZE + keys % BLOCK_SIZE
    elements = tl.arange(0, LINES) * (LINE_BYTES * 8 // pages_ptr.dtype.element_ty.primitive_bitwidth)
    where = pages_ptr + (block * BLOCK_STRIDE + line * HEAD_DIM)[:, None] + elements[None, :]
    prefetch_lines(where)
    prefetch_lines(where + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)


# As for prefill: a step's arrays may begin at any alignment.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr"])
def flash_decode_kernel(
    queries_ptr, pages_ptr, scales_ptr, head_scales_ptr, out_ptr, sums_ptr, stats_ptr, arrivals_ptr, tables_ptr,
    lengths_ptr, query_stride, out_stride, table_stride, score_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    SOFT_CAP: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence and key-value head, and merge all parts after the last; with a single split,
    directly into the result. LINES: of each first key and value, to fetch before waiting.
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    # Before waiting: no kernel of the step writes lengths and tables, nor the keys of tokens before its own.
    length = tl.load(lengths_ptr + sequence)
    first, origin, span, num_parts = _span(length, NUM_SPLITS, MIN_KEYS, FIXED_KEYS, WINDOW, BLOCK_N)
    begin = tl.maximum(origin + split * span, first)
    end = tl.minimum(origin + (split + 1) * span, length)
    tables_ptr += sequence * table_stride
    if LINES > 0:
        _prefetch_tile(
            pages_ptr, tables_ptr, kv_head, begin, end,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, BLOCK_N, LINES,
        )  # fmt: skip
    wait_for_previous(PDL)
    num_parts = tl.maximum(num_parts, 1)  # of padding: one, without keys, whose result is zeros
    if (NUM_SPLITS > 1) & (split >= num_parts):
        return
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lanes
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    columns = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(queries_ptr + sequence * query_stride + columns, mask=mask, other=0.0)
    positions = tl.where(lanes < GROUP, length - 1, -1)
    if head_scales_ptr is not None:
        score_scale *= tl.load(head_scales_ptr + kv_head)
    largest, total, acc = attend_keys(
        empty_state(BLOCK_M, BLOCK_D), queries, positions, pages_ptr, scales_ptr, tables_ptr,
        kv_head, begin, end, score_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, True, SOFT_CAP,
    )  # fmt: skip
    out_ptr += sequence * out_stride
    if NUM_SPLITS > 1:
        first_head = (sequence * NUM_KV_HEADS + kv_head) * GROUP
        part = (first_head + lanes) * NUM_SPLITS + split
        tl.store(sums_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(stats_ptr + part * 2, largest, mask=lanes < GROUP)
        tl.store(stats_ptr + part * 2 + 1, total, mask=lanes < GROUP)
        tl.debug_barrier()  # every thread's values are written before one of them says so
        arrivals_ptr += sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            tl.store(arrivals_ptr, 0)
            whole_total, whole_acc = _merged(
                sums_ptr, stats_ptr, first_head, num_parts,
                GROUP, HEAD_DIM, NUM_SPLITS, FIXED_KEYS, BLOCK_G, BLOCK_D, BLOCK_S,
            )  # fmt: skip
            _store_result(out_ptr, head_scales_ptr, whole_total, whole_acc, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM)
    else:
        _store_result(out_ptr, head_scales_ptr, total, acc, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM)


def flash_decode(
    queries: Tensor,
    layer: LayerPages,
    out: Tensor,
    *,
    tables: Tensor,
    lengths: Tensor,
    window: int | None,
    workspace: DecodeWorkspace | None,
    launch: DecodeLaunch,
    pdl: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend one row per sequence, whose own key is in the cache already; fills `out`.

    queries: `[num_seqs, num_heads, head_dim]`, heads contiguous, rows at any stride; out: likewise.
    tables: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are never read.
    lengths: int32 `[num_seqs]`, the row included; 0 for padding, whose result is zeros.
    workspace: its number of splits is used, for at least `num_seqs` sequences; None for one split. With
    `launch.fixed_keys`, splits times `fixed_keys` must reach the longest sequence.
    pdl: start while the kernel before ends; then no kernel since the last one without it may have written `tables` or
    `lengths`. scale, soft_cap: as in `paged_prefill`.
    """
    num_seqs, num_heads, head_dim = queries.shape
    if not num_seqs:
        return
    group, splits = num_heads // layer.num_kv_heads, workspace.sums.shape[2] if workspace else 1
    parts = (workspace.sums, workspace.stats, workspace.arrivals) if workspace else (None, None, None)
    num_lines = max(1, head_dim * layer.pages.element_size() // LINE_BYTES.value)
    flash_decode_kernel[(num_seqs, layer.num_kv_heads, splits)](
        queries, layer.pages, layer.token_scales, layer.head_scales, out, *parts, tables, lengths,
        queries.stride(0), out.stride(0), tables.stride(0), score_scale(head_dim, scale),
        GROUP=group,
        NUM_KV_HEADS=layer.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=layer.block_size,
        BLOCK_STRIDE=layer.block_stride,
        SCALE_STRIDE=layer.scale_stride,
        WINDOW=window or 0,
        NUM_SPLITS=splits,
        MIN_KEYS=launch.min_keys,
        FIXED_KEYS=launch.fixed_keys,
        BLOCK_M=max(launch.block_m, power_of_two(group, 16)),
        BLOCK_N=launch.whole_block_n if splits == 1 and launch.whole_block_n else launch.block_n,
        BLOCK_D=power_of_two(head_dim, 16),
        BLOCK_G=power_of_two(group),
        BLOCK_S=merged_parts(group, splits),
        SOFT_CAP=base_two(soft_cap),
        LINES=1 << (num_lines.bit_length() - 1) if pdl and launch.prefetches else 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
        enable_fp_fusion=not launch.fixed_keys,
    )  # fmt: skip


def merged_parts(group: int, splits: int) -> int:
    """Parts that are merged at once, of a group of so many heads."""
    return max(1, min(_MERGED_AT_ONCE // power_of_two(group), power_of_two(splits)))


def choose_splits(*, batch: int, num_kv_heads: int, max_length: int, num_sms: int, launch: DecodeLaunch) -> int:
    """Number of parts into which a sequence may be cut: a power of two, since kernels are compiled for each number.

    With `fixed_keys`, enough for the runs of the longest sequence. Else at most two programs per multiprocessor, so
    that one loads while the other computes, but never parts of fewer than `min_keys` keys nor more than 64 parts,
    whose merging would cost more than it saves. A step's own longest sequence may be given, or, for a graph, the
    longest that any step may have: sequences too short for so many parts leave programs idle, at about a
    microsecond per wave of them.
    """
    if launch.fixed_keys:
        return power_of_two(max(1, -(-max_length // launch.fixed_keys)))
    wanted = max(1, min(2 * num_sms // (batch * num_kv_heads), -(-max_length // launch.min_keys), _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
