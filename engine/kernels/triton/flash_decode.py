"""Attention of one row per sequence, its keys split among programs: flash decoding (Dao et al., 2023).

A program computes all query heads that share a key-value head, over one part of one sequence; a second kernel merges
the parts of a sequence. Lengths are read on the device, so a CUDA graph captured for a padded batch serves any; a
sequence of length 0, padding, gets zeros.

Sequences of about equal length are each cut into as many parts, of `min_keys` keys at least: `choose_splits`. Were one
far longer than the others, its few programs would still be busy long after all others have ended. So sequences of
unequal lengths (`are_uneven`) get parts of about equal length, in the spirit of FlashInfer (Ye et al., 2025): every
program finds by itself from the lengths whose part is its own, before the kernel before it has ended, and nothing is
planned on the host. On an H200 32 sequences of 1,024 keys and one of 102,400 then take 157 us instead of 1,780, and 128
of lengths as in chats 270 instead of 456; of equal lengths it would cost up to 3 us more. With `fixed_keys` parts are
runs of that many keys at absolute positions, merged one after another, so that a row's result depends on neither batch
nor step, and equals that of `engine.kernels.triton.paged_prefill` with the same `fixed_keys`, `block_m` and `block_n`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.triton.attention_tiles import attend_keys, empty_state, first_key_of, merge_states
from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.paged_prefill import base_two, score_scale
from engine.kernels.triton.pages import LayerPages, power_of_two
from engine.kernels.triton.tuning import DecodeLaunch

_MAX_SPLITS = 64
_MAX_PARTS = tl.constexpr(_MAX_SPLITS)
"""Most parts of one sequence: merging more would cost more than it saves."""
_LEAST_SEQS = 64
"""Sequences that a kernel looks at, rounded up to a power of two: one that looks at fewer would hardly be faster."""
_LEAST_UNEVEN_KEYS = 512
"""Shorter sequences are over soon enough."""
_MERGED_AT_ONCE = 16
"""Parts that the merging kernel holds in registers together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWorkspace:
    """Memory for parts until they are merged: reused by every layer and step, so a graph may hold its address."""

    sums: Tensor  # float32 [num_parts, num_heads, head_dim], weighted sums of values
    stats: Tensor  # float32 [num_parts, num_heads, 2], largest exponent and total weight

    @classmethod
    def allocate(cls, num_parts: int, num_heads: int, head_dim: int, device: torch.device | str) -> "DecodeWorkspace":
        """Allocate memory for up to `num_parts` parts of all sequences together."""
        sums = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=device)
        return cls(sums=sums, stats=torch.empty(num_parts, num_heads, 2, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCut:
    """How the keys of sequences with one row are cut into parts, and the launch for it."""

    launch: DecodeLaunch
    num_splits: int = 0
    """Parts of every sequence; 0: parts are about as long in all of them or, with `launch.fixed_keys`, runs."""
    even_parts: int = 1
    """Parts into which all keys together are cut where `num_splits` is 0 and lengths are about equal."""
    uneven_parts: int = 1
    """The same of unequal lengths."""
    further_runs: int = 0
    """Room for runs of fixed length, the first of each sequence not counted."""

    def num_parts(self, num_seqs: int) -> int:
        """Parts that so many sequences may have together. By length those that are shorter than a share have one each,
        and the others at most as many as there are shares.
        """
        if self.num_splits:
            return num_seqs * self.num_splits
        return num_seqs + (self.further_runs if self.launch.fixed_keys else max(self.even_parts, self.uneven_parts))


@triton.jit
def _num_parts(keys, span, FIXED_KEYS: tl.constexpr):
    """Parts of a sequence of so many keys; one of a sequence without any."""
    if FIXED_KEYS > 0:
        return tl.maximum(tl.cdiv(keys, FIXED_KEYS), 1)
    else:
        return tl.minimum(tl.maximum(keys // span, 1), _MAX_PARTS)


@triton.jit
def _origin_of(length, WINDOW: tl.constexpr, FIXED_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Position at which the first part begins, and the first tile with keys in view."""
    first = first_key_of(length - 1, WINDOW, BLOCK_N)
    if FIXED_KEYS > 0:
        return first // FIXED_KEYS * FIXED_KEYS, first
    else:
        return first, first


@triton.jit
def _even_span(keys, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of each part but the last, of a sequence in at most NUM_SPLITS parts: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, NUM_SPLITS), BLOCK_N) * BLOCK_N, MIN_KEYS)


@triton.jit
def _plan(
    lengths_ptr, num_seqs, even_parts, uneven_parts,
    WINDOW: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Number of keys for which a sequence gets a part, and int32 `[SEQS]`, the parts of each; 0 beyond `num_seqs`."""
    seqs = tl.arange(0, SEQS)
    lengths = tl.load(lengths_ptr + seqs, mask=seqs < num_seqs, other=0)
    origin, _ = _origin_of(lengths, WINDOW, FIXED_KEYS, BLOCK_N)
    keys = lengths - origin
    span = FIXED_KEYS
    if FIXED_KEYS == 0:
        total, longest = tl.sum(keys, 0), tl.max(keys, 0)
        # See `are_uneven`; in a window even sequences of unequal lengths may be equal.
        is_uneven = 2 * longest * tl.sum((keys > 0).to(tl.int32), 0) > 3 * total
        span = tl.maximum(tl.cdiv(total, tl.where(is_uneven, uneven_parts, even_parts)), MIN_KEYS)
    return span, tl.where(seqs < num_seqs, _num_parts(keys, span, FIXED_KEYS), 0)


@triton.jit
def _store_whole(out_ptr, acc, total, value_scale, columns, mask):
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if value_scale is not None:
        result *= value_scale
    tl.store(out_ptr + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    sums_ptr, stats_ptr, largest, total, acc, line, is_row, dims, HEAD_DIM: tl.constexpr, mask
):  # fmt: skip
    tl.store(sums_ptr + line[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    tl.store(stats_ptr + line * 2, largest, mask=is_row)
    tl.store(stats_ptr + line * 2 + 1, total, mask=is_row)


@triton.jit
def _merged(
    sums_ptr, stats_ptr, first_part, num_parts, head, num_heads, dims,
    HEAD_DIM: tl.constexpr, FIXED_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The weighted values of one query head of one sequence: of fixed runs in order, as in prefill; else several at a
    time.
    """
    first_line = first_part.to(tl.int64) * num_heads + head
    sums_ptr += first_line * HEAD_DIM
    stats_ptr += first_line * 2
    largest, total, acc = tl.max(tl.full([1], float("-inf"), tl.float32)), 0.0, tl.zeros([BLOCK_D], tl.float32)
    if FIXED_KEYS > 0:
        for split in tl.range(0, num_parts):
            line = split * num_heads
            other = tl.load(sums_ptr + line * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
            stats = (tl.load(stats_ptr + line * 2), tl.load(stats_ptr + line * 2 + 1), other)
            largest, total, acc = merge_states((largest, total, acc), stats)
    else:
        for begin in tl.range(0, num_parts, BLOCK_P):
            splits = begin + tl.arange(0, BLOCK_P)
            known = splits < num_parts
            lines = splits * num_heads
            peaks = tl.load(stats_ptr + lines * 2, mask=known, other=float("-inf"))
            totals = tl.load(stats_ptr + lines * 2 + 1, mask=known, other=0.0)
            mask = known[:, None] & (dims < HEAD_DIM)[None, :]
            others = tl.load(sums_ptr + lines[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            higher = tl.maximum(largest, tl.max(peaks, 0))
            weights = tl.exp2(peaks - higher)
            shrink = tl.exp2(largest - higher)
            total = total * shrink + tl.sum(weights * totals, 0)
            acc = acc * shrink + tl.sum(others * weights[:, None], 0)
            largest = higher
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "even_parts", "uneven_parts"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr"],
)
def flash_decode_kernel(
    queries_ptr, pages_ptr, scales_ptr, head_scales_ptr, out_ptr, sums_ptr, stats_ptr, tables_ptr, lengths_ptr,
    query_stride, out_stride, table_stride, score_scale, num_seqs, even_parts, uneven_parts,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SEQS: tl.constexpr,
    WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFT_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence and key-value head; if it is the sequence's only one, directly into the result.

    Programs are `[num_seqs, num_kv_heads, NUM_SPLITS]`; NUM_SPLITS 0: `[num_kv_heads, num_parts]`, idle ones last.
    """
    if NUM_SPLITS > 0:
        sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        part = sequence * NUM_SPLITS + split
        length = tl.load(lengths_ptr + sequence)  # written before the step's first kernel
        wait_for_previous(PDL)
        origin, first = _origin_of(length, WINDOW, FIXED_KEYS, BLOCK_N)
        each = _even_span(length - first, NUM_SPLITS, MIN_KEYS, BLOCK_N)
        if (NUM_SPLITS > 1) & (split >= tl.cdiv(length - first, each)):
            return
    else:
        kv_head, part = tl.program_id(0), tl.program_id(1)
        span, parts = _plan(lengths_ptr, num_seqs, even_parts, uneven_parts, WINDOW, MIN_KEYS, FIXED_KEYS,
                            BLOCK_N, SEQS)  # fmt: skip
        ends = tl.cumsum(parts, 0)
        is_over = ends <= part
        sequence = tl.sum(is_over.to(tl.int64), 0)
        split = part - tl.max(tl.where(is_over, ends, 0), 0)
        length = tl.load(lengths_ptr + sequence, mask=sequence < num_seqs, other=0)
        wait_for_previous(PDL)
        if sequence >= num_seqs:
            return
        origin, first = _origin_of(length, WINDOW, FIXED_KEYS, BLOCK_N)
        num_parts = _num_parts(length - origin, span, FIXED_KEYS)
        each = FIXED_KEYS if FIXED_KEYS > 0 else tl.cdiv(tl.cdiv(length - origin, num_parts), BLOCK_N) * BLOCK_N
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lanes
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    columns = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(queries_ptr + sequence * query_stride + columns, mask=mask, other=0.0)
    positions = tl.where(lanes < GROUP, length - 1, -1)
    begin = tl.maximum(origin + split * each, first)
    end = tl.minimum(origin + (split + 1) * each, length)
    if head_scales_ptr is not None:
        score_scale *= tl.load(head_scales_ptr + kv_head)
    largest, total, acc = attend_keys(
        empty_state(BLOCK_M, BLOCK_D), queries, positions, pages_ptr, scales_ptr,
        tables_ptr + sequence * table_stride, kv_head, begin, end, score_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, WINDOW, BLOCK_N, True, SOFT_CAP,
    )  # fmt: skip
    value_scale = tl.load(head_scales_ptr + NUM_KV_HEADS + kv_head) if head_scales_ptr is not None else None
    line = part.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    out_ptr += sequence * out_stride
    if NUM_SPLITS == 1:
        _store_whole(out_ptr, acc, total, value_scale, columns, mask)
    elif NUM_SPLITS > 1 or num_parts > 1:
        _store_part(sums_ptr, stats_ptr, largest, total, acc, line, lanes < GROUP, dims, HEAD_DIM, mask)
    else:
        _store_whole(out_ptr, acc, total, value_scale, columns, mask)


@triton.jit(
    do_not_specialize=["num_seqs", "even_parts", "uneven_parts"], do_not_specialize_on_alignment=["lengths_ptr"]
)
def merge_parts_kernel(
    out_ptr, head_scales_ptr, sums_ptr, stats_ptr, lengths_ptr, out_stride, num_seqs, even_parts, uneven_parts,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SEQS: tl.constexpr, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr, FIXED_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge one query head of one sequence. Programs are `[num_heads, num_seqs]`; with NUM_SPLITS 0 `[num_heads,
    sequences that may have several parts]`.
    """
    head, number, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if NUM_SPLITS > 0:
        sequence = number.to(tl.int64)
        length = tl.load(lengths_ptr + sequence)
        wait_for_previous(PDL)
        keys = length - first_key_of(length - 1, WINDOW, BLOCK_N)
        first_part, num_parts = sequence * NUM_SPLITS, tl.cdiv(keys, _even_span(keys, NUM_SPLITS, MIN_KEYS, BLOCK_N))
    else:
        _, parts = _plan(lengths_ptr, num_seqs, even_parts, uneven_parts, WINDOW, MIN_KEYS, FIXED_KEYS, BLOCK_N, SEQS)
        has_several = parts > 1
        is_own = has_several & (tl.cumsum(has_several.to(tl.int32), 0) == number + 1)
        num_parts = tl.sum(tl.where(is_own, parts, 0), 0)
        first_part = tl.sum(tl.where(is_own, tl.cumsum(parts, 0), 0), 0) - num_parts
        sequence = tl.sum(tl.where(is_own, tl.arange(0, SEQS), 0).to(tl.int64), 0)
        wait_for_previous(PDL)
        if num_parts == 0:
            return
    dims = tl.arange(0, BLOCK_D)
    result = _merged(
        sums_ptr, stats_ptr, first_part, num_parts, head, num_heads, dims, HEAD_DIM, FIXED_KEYS, BLOCK_D, BLOCK_P
    )
    if head_scales_ptr is not None:
        result *= tl.load(head_scales_ptr + num_heads // GROUP + head // GROUP)
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
    cut: DecodeCut,
    workspace: DecodeWorkspace | None,
    pdl: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend one row per sequence, whose own key is in the cache already; fills `out`.

    queries: `[num_seqs, num_heads, head_dim]`, heads contiguous, rows at any stride; out: likewise.
    tables: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are never read.
    lengths: int32 `[num_seqs]`, the row included; 0 for padding, whose result is zeros.
    workspace: with room for `cut.num_parts(num_seqs)` parts; None where no sequence is cut.
    pdl: start while the kernel before ends, which must not write `lengths`. scale, soft_cap: as in `paged_prefill`.
    Raises ValueError for a workspace without that room.
    """
    num_seqs, num_heads, head_dim = queries.shape
    if not num_seqs:
        return
    launch, splits, num_parts = cut.launch, cut.num_splits, cut.num_parts(num_seqs)
    if splits != 1 and (workspace is None or len(workspace.sums) < num_parts):
        raise ValueError(f"{num_seqs} sequences need room for {num_parts} parts")
    sums, stats = (workspace.sums, workspace.stats) if workspace else (None, None)
    shares = cut.even_parts, cut.uneven_parts
    group, block_d = num_heads // layer.num_kv_heads, power_of_two(head_dim, 16)
    common = {"WINDOW": window or 0, "NUM_SPLITS": splits, "FIXED_KEYS": launch.fixed_keys, "HEAD_DIM": head_dim}
    common |= {"GROUP": group, "MIN_KEYS": launch.min_keys, "BLOCK_N": launch.block_n, "BLOCK_D": block_d}
    common |= {"SEQS": 1 if splits else power_of_two(num_seqs, _LEAST_SEQS), "PDL": pdl, "launch_pdl": pdl}
    common |= {"enable_fp_fusion": not launch.fixed_keys}
    heads = layer.num_kv_heads
    flash_decode_kernel[(num_seqs, heads, splits) if splits else (heads, num_parts)](
        queries, layer.pages, layer.token_scales, layer.head_scales, out, sums, stats, tables, lengths,
        queries.stride(0), out.stride(0), tables.stride(0), score_scale(head_dim, scale), num_seqs, *shares,
        NUM_KV_HEADS=heads,
        BLOCK_SIZE=layer.block_size,
        BLOCK_STRIDE=layer.block_stride,
        SCALE_STRIDE=layer.scale_stride,
        BLOCK_M=max(launch.block_m, power_of_two(group, 16)),
        SOFT_CAP=base_two(soft_cap),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **common,
    )  # fmt: skip
    # Those with several parts have that many of the shares.
    several = num_seqs if launch.fixed_keys or splits else min(num_seqs, max(shares) // 2)
    if splits != 1 and several:
        merge_parts_kernel[(num_heads, several)](
            out, layer.head_scales, sums, stats, lengths, out.stride(0), num_seqs, *shares,
            BLOCK_P=_MERGED_AT_ONCE if splits == 0 else min(_MERGED_AT_ONCE, power_of_two(splits)), **common,
        )  # fmt: skip


def are_uneven(lengths: NDArray[np.integer[Any]]) -> bool:
    """Whether the longest sequence is so much longer than the mean, by half, that parts should be about equally long
    in all of them.

    lengths: `[num_seqs]`.
    """
    longest = int(lengths.max(initial=0))
    return longest >= _LEAST_UNEVEN_KEYS and 2 * longest * len(lengths) > 3 * int(lengths.sum())


def cut_evenly(
    launches: Sequence[DecodeLaunch], *, batch: int, num_kv_heads: int, max_length: int, num_sms: int
) -> DecodeCut:
    """Cut `batch` sequences of about equal lengths, of up to `max_length` keys."""
    launch = choose_launch(launches, batch=batch, num_kv_heads=num_kv_heads, num_sms=num_sms)
    splits = choose_splits(
        batch=batch, num_kv_heads=num_kv_heads, max_length=max_length, num_sms=num_sms, launch=launch
    )
    return DecodeCut(launch=launch, num_splits=splits)


def cut_by_length(launch: DecodeLaunch, *, num_kv_heads: int, num_sms: int, further_runs: int = 0) -> DecodeCut:
    """Cut sequences of any lengths, those of unequal ones into more parts, so that the last to end are short."""
    even, uneven = launch.programs_per_sm, launch.uneven_programs_per_sm
    return DecodeCut(
        launch=launch,
        even_parts=max(1, even * num_sms // num_kv_heads),
        uneven_parts=max(1, uneven * num_sms // num_kv_heads),
        further_runs=further_runs,
    )


def choose_launch(launches: Sequence[DecodeLaunch], *, batch: int, num_kv_heads: int, num_sms: int) -> DecodeLaunch:
    """The first launch that is for as many programs as `batch` whole sequences make, else the last.

    With a program for each multiprocessor, what is under way to it must fit into one program's shared memory: large
    tiles, several of them. With many, small programs share a multiprocessor, and end at different times.
    """
    programs = batch * num_kv_heads
    fit = (launch for launch in launches if programs <= launch.programs_per_sm * num_sms)
    return next(fit, launches[-1])


def choose_splits(*, batch: int, num_kv_heads: int, max_length: int, num_sms: int, launch: DecodeLaunch) -> int:
    """Number of parts into which each sequence may be cut: a power of two, since kernels are compiled for each number.

    At most the launch's programs for each multiprocessor, but never parts of fewer than `min_keys` keys nor more than
    64 parts. A step's own longest sequence may be given, or, for a graph, the longest that any step may have: sequences
    too short for so many parts leave programs idle, at about a microsecond per wave of them.
    """
    programs = launch.programs_per_sm * num_sms
    wanted = max(1, min(programs // (batch * num_kv_heads), -(-max_length // launch.min_keys), _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
