"""Attention of one row per sequence, its keys split among programs: flash decoding (Dao et al., 2023).

A program computes all query heads that share a key-value head, over one part of one sequence; a second kernel merges
the parts. A step's launch depends only on the batch's size and the most splits it may need: lengths are read
on the device, and parts that a short sequence does not need return at once. So a CUDA graph captured for a padded
batch serves any lengths up to the longest it was captured for; a sequence of length 0, padding, gets zeros.

`choose_launch` chooses the launch and `choose_splits` the number of splits. A sequence is split on the device: evenly,
in whole tiles, and at least `min_keys` each. With `fixed_keys`: in runs of that many keys at absolute positions, merged
one after another, so that a row's result depends on neither batch nor step, and equals that of
`engine.kernels.triton.paged_prefill` with the same `fixed_keys`, `block_m` and `block_n`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.attention_tiles import attend_keys, empty_state, first_key_of, merge_states
from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.paged_prefill import base_two, score_scale
from engine.kernels.triton.pages import LayerPages, power_of_two
from engine.kernels.triton.tuning import DecodeLaunch

_MAX_SPLITS = 64
_MERGED_AT_ONCE = 16
"""Parts that the merging kernel holds in registers together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWorkspace:
    """Memory for parts until they are merged: reused by every layer and step, so a graph may hold its address."""

    sums: Tensor  # float32 [batch, num_heads, num_splits, head_dim], weighted sums of values
    stats: Tensor  # float32 [batch, num_heads, num_splits, 2], largest exponent and total weight

    @classmethod
    def allocate(
        cls, batch: int, num_heads: int, num_splits: int, head_dim: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Allocate memory for up to `batch` sequences in up to `num_splits` parts."""
        sums = torch.empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32, device=device)
        return cls(sums=sums, stats=torch.empty(batch, num_heads, num_splits, 2, dtype=torch.float32, device=device))


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


# As for prefill: a step's arrays may begin at any alignment.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr"])
def flash_decode_kernel(
    queries_ptr, pages_ptr, scales_ptr, head_scales_ptr, out_ptr, sums_ptr, stats_ptr, tables_ptr, lengths_ptr,
    query_stride, out_stride, table_stride, score_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFT_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence and key-value head; with a single split, directly into the result."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)  # written before the step's first kernel
    wait_for_previous(PDL)
    first, origin, span, num_parts = _span(length, NUM_SPLITS, MIN_KEYS, FIXED_KEYS, WINDOW, BLOCK_N)
    if (NUM_SPLITS > 1) & (split >= num_parts):
        return
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lanes
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    columns = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(queries_ptr + sequence * query_stride + columns, mask=mask, other=0.0)
    positions = tl.where(lanes < GROUP, length - 1, -1)
    begin = tl.maximum(origin + split * span, first)
    end = tl.minimum(origin + (split + 1) * span, length)
    if head_scales_ptr is not None:
        score_scale *= tl.load(head_scales_ptr + kv_head)
    largest, total, acc = attend_keys(
        empty_state(BLOCK_M, BLOCK_D), queries, positions, pages_ptr, scales_ptr,
        tables_ptr + sequence * table_stride, kv_head, begin, end, score_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, True, SOFT_CAP,
    )  # fmt: skip
    if NUM_SPLITS > 1:
        part = (sequence * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS + split
        tl.store(sums_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(stats_ptr + part * 2, largest, mask=lanes < GROUP)
        tl.store(stats_ptr + part * 2 + 1, total, mask=lanes < GROUP)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        if head_scales_ptr is not None:
            result *= tl.load(head_scales_ptr + NUM_KV_HEADS + kv_head)
        tl.store(out_ptr + sequence * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["lengths_ptr"])
def merge_parts_kernel(
    out_ptr, head_scales_ptr, sums_ptr, stats_ptr, lengths_ptr, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr,
    FIXED_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge one query head of one sequence. Fixed runs are merged in order, as in prefill; others several at a time."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + sequence)
    wait_for_previous(PDL)
    _, _, _, num_parts = _span(length, NUM_SPLITS, MIN_KEYS, FIXED_KEYS, WINDOW, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    first_part = (sequence * tl.num_programs(1) + head) * NUM_SPLITS
    sums_ptr += first_part * HEAD_DIM
    stats_ptr += first_part * 2
    largest, total, acc = tl.max(tl.full([1], float("-inf"), tl.float32)), 0.0, tl.zeros([BLOCK_D], tl.float32)
    if FIXED_KEYS > 0:
        for part in tl.range(0, num_parts):
            other = tl.load(sums_ptr + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
            stats = (tl.load(stats_ptr + part * 2), tl.load(stats_ptr + part * 2 + 1), other)
            largest, total, acc = merge_states((largest, total, acc), stats)
    else:
        for begin in tl.range(0, num_parts, BLOCK_S):
            parts = begin + tl.arange(0, BLOCK_S)
            known = parts < num_parts
            peaks = tl.load(stats_ptr + parts * 2, mask=known, other=float("-inf"))
            totals = tl.load(stats_ptr + parts * 2 + 1, mask=known, other=0.0)
            mask = known[:, None] & (dims < HEAD_DIM)[None, :]
            others = tl.load(sums_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            higher = tl.maximum(largest, tl.max(peaks, 0))
            weights = tl.exp2(peaks - higher)
            shrink = tl.exp2(largest - higher)
            total = total * shrink + tl.sum(weights * totals, 0)
            acc = acc * shrink + tl.sum(others * weights[:, None], 0)
            largest = higher
    result = acc / tl.where(total > 0.0, total, 1.0)
    if head_scales_ptr is not None:
        result *= tl.load(head_scales_ptr + tl.num_programs(1) // GROUP + head // GROUP)
    where = out_ptr + sequence * out_stride + head * HEAD_DIM + dims
    tl.store(where, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


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
    pdl: start while the kernel before ends, which must not write `lengths`. scale, soft_cap: as in `paged_prefill`.
    """
    num_seqs, num_heads, head_dim = queries.shape
    if not num_seqs:
        return
    group, splits = num_heads // layer.num_kv_heads, workspace.sums.shape[2] if workspace else 1
    block_d = power_of_two(head_dim, 16)
    split = {"WINDOW": window or 0, "NUM_SPLITS": splits, "FIXED_KEYS": launch.fixed_keys, "HEAD_DIM": head_dim}
    split |= {"GROUP": group, "MIN_KEYS": launch.min_keys, "BLOCK_N": launch.block_n, "BLOCK_D": block_d}
    sums, stats = (workspace.sums, workspace.stats) if workspace else (None, None)
    flash_decode_kernel[(num_seqs, layer.num_kv_heads, splits)](
        queries, layer.pages, layer.token_scales, layer.head_scales, out, sums, stats, tables, lengths,
        queries.stride(0), out.stride(0), tables.stride(0), score_scale(head_dim, scale),
        NUM_KV_HEADS=layer.num_kv_heads,
        BLOCK_SIZE=layer.block_size,
        BLOCK_STRIDE=layer.block_stride,
        SCALE_STRIDE=layer.scale_stride,
        BLOCK_M=max(launch.block_m, power_of_two(group, 16)),
        SOFT_CAP=base_two(soft_cap),
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
        enable_fp_fusion=not launch.fixed_keys,
        **split,
    )  # fmt: skip
    if splits > 1:
        merge_parts_kernel[(num_seqs, num_heads)](
            out, layer.head_scales, sums, stats, lengths, out.stride(0),
            BLOCK_S=min(_MERGED_AT_ONCE, power_of_two(splits)), PDL=pdl, launch_pdl=pdl,
            enable_fp_fusion=not launch.fixed_keys, **split,
        )  # fmt: skip


def choose_launch(launches: Sequence[DecodeLaunch], *, batch: int, num_kv_heads: int, num_sms: int) -> DecodeLaunch:
    """The first launch that is for as many programs as `batch` whole sequences make, else the last.

    With a program for each multiprocessor, what is under way to it must fit into one program's shared memory: large
    tiles, several of them. With many, small programs share a multiprocessor, and end at different times.
    """
    programs = batch * num_kv_heads
    fit = (launch for launch in launches if programs <= launch.programs_per_sm * num_sms)
    return next(fit, launches[-1])


def choose_splits(*, batch: int, num_kv_heads: int, max_length: int, num_sms: int, launch: DecodeLaunch) -> int:
    """Number of parts into which a sequence may be cut: a power of two, since kernels are compiled for each number.

    With `fixed_keys`, enough for the runs of the longest sequence. Else at most the launch's programs for each
    multiprocessor, but never parts of fewer than `min_keys` keys nor more than 64 parts, whose merging would cost more
    than it saves. A step's own longest sequence may be given, or, for a graph, the
    longest that any step may have: sequences too short for so many parts leave programs idle, at about a
    microsecond per wave of them.
    """
    if launch.fixed_keys:
        return power_of_two(max(1, -(-max_length // launch.fixed_keys)))
    programs = launch.programs_per_sm * num_sms
    wanted = max(1, min(programs // (batch * num_kv_heads), -(-max_length // launch.min_keys), _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
