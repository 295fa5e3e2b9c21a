"""Operations on a projected row before attention, in one pass: norms of queries and keys, rotation, KV write.

Queries are normalised (where the model does that) and rotated in place; keys likewise, and written to the cache with
the values, quantised if the cache is. Nothing is rounded between the steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent_launch import wait_for_previous
from engine.kernels.triton.pages import LayerPages, power_of_two
from engine.kv_storage.kv_codes import LARGEST_CODE
from engine.model.layers.norm import HeadNorm

_HEADS_PER_PROGRAM = 8


@triton.jit
def _code(value, pages_ptr):
    """Nearest code of the pages' dtype, ties to even, for values within the codes' range.

    Rounded here in float32, so that the conversion is exact and all devices and the interpreter make the same codes:
    adding and subtracting 1.5 * 2^23 steps leaves no bits for a fraction of a step, so the addition rounds.
    """
    if pages_ptr.dtype.element_ty == tl.int8:
        value = (value + 12582912.0) - 12582912.0
    if pages_ptr.dtype.element_ty == tl.float8e4nv:
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # three bits stay
        subnormal = (value + 24576.0) - 24576.0  # below 2^-6 the step is 2^-9
        value = tl.where(tl.abs(value) < 0.015625, subnormal, normal)
    return value.to(pages_ptr.dtype.element_ty)


@triton.jit
def _store_kv(low, high, slot, head, stored, pages_ptr, scales_ptr, head_scales_ptr, LARGEST: tl.constexpr,
              HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
              SCALE_STRIDE: tl.constexpr):  # fmt: skip
    """Store both halves of some heads of one token; `head` counts keys' heads, then values'."""
    # Rows read this slot with weight zero while its block is partly filled, and zero times NaN is NaN.
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    high = tl.where(tl.abs(high) < float("inf"), high, 0.0)
    block, line = slot // BLOCK_SIZE, head * BLOCK_SIZE + slot % BLOCK_SIZE
    if scales_ptr is not None:
        peak = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        tl.store(scales_ptr + block * SCALE_STRIDE + line, peak / LARGEST, mask=stored)
        factor = tl.where(peak > 1e-30, LARGEST / tl.maximum(peak, 1e-30), 0.0)[:, None]  # 127 / 1e-30 is finite
        low = tl.minimum(tl.maximum(low * factor, -LARGEST), LARGEST)
        high = tl.minimum(tl.maximum(high * factor, -LARGEST), LARGEST)
    if head_scales_ptr is not None:
        scale = tl.load(head_scales_ptr + head, mask=stored, other=1.0)[:, None]
        low = tl.minimum(tl.maximum(low / scale, -LARGEST), LARGEST)
        high = tl.minimum(tl.maximum(high / scale, -LARGEST), LARGEST)
    half = tl.arange(0, low.shape[1])
    mask = stored[:, None] & (half < HALF)[None, :]
    where = pages_ptr + (block * BLOCK_STRIDE + line * (2 * HALF))[:, None] + half[None, :]
    tl.store(where, _code(low, pages_ptr), mask=mask)
    tl.store(where + HALF, _code(high, pages_ptr), mask=mask)


@triton.jit
def rope_kv_kernel(
    qkv_ptr, pages_ptr, scales_ptr, head_scales_ptr, cos_ptr, sin_ptr, slots_ptr, query_norm_ptr, key_norm_ptr,
    qkv_stride, angle_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some heads of one row: the head's number tells whether it is a query, key or value."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    present = head < NUM_HEADS + 2 * NUM_KV_HEADS
    mask = present[:, None] & (half < HALF)[None, :]
    # Angles and slots are there before the step's first kernel that starts early.
    cos = tl.load(cos_ptr + row * angle_stride + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * angle_stride + half, mask=half < HALF, other=0.0)[None, :]
    slot = tl.load(slots_ptr + row)
    wait_for_previous(PDL)
    where = qkv_ptr + row * qkv_stride + head[:, None] * (2 * HALF) + half[None, :]
    low = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
    is_query, is_value = (head < NUM_HEADS)[:, None], (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if query_norm_ptr is not None:
        scale = tl.math.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        inside = half < HALF
        query_low = tl.load(query_norm_ptr + half, mask=inside, other=0.0).to(tl.float32)
        key_low = tl.load(key_norm_ptr + half, mask=inside, other=0.0).to(tl.float32)
        query_high = tl.load(query_norm_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
        key_high = tl.load(key_norm_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
        low = tl.where(is_value, low, low * scale * tl.where(is_query, query_low[None, :], key_low[None, :]))
        high = tl.where(is_value, high, high * scale * tl.where(is_query, query_high[None, :], key_high[None, :]))
    turned_low = tl.where(is_value, low, low * cos - high * sin)
    turned_high = tl.where(is_value, high, high * cos + low * sin)
    tl.store(where, turned_low.to(qkv_ptr.dtype.element_ty), mask=mask & is_query)
    tl.store(where + HALF, turned_high.to(qkv_ptr.dtype.element_ty), mask=mask & is_query)
    stored = tl.where(present & (head >= NUM_HEADS), slot, -1) >= 0
    _store_kv(turned_low, turned_high, slot, head - NUM_HEADS, stored, pages_ptr, scales_ptr, head_scales_ptr, LARGEST,
              HALF, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE)  # fmt: skip


def rope_kv(
    qkv: Tensor,
    layer: LayerPages,
    *,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    norm: HeadNorm | None,
    pdl: bool = False,
) -> None:
    """Normalise and rotate queries in place; write keys and values to the cache (the keys in `qkv` do not change).

    qkv: `[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]`, rows at any stride; head_dim is even.
    cos, sin: float32 `[num_rows, head_dim / 2]`, of equal strides; pairs are (i, i + head_dim / 2).
    slots: int64 `[num_rows]`, block times block size plus offset; negative for padding, which writes no KV.
    pdl: start while the kernel before ends; a kernel launched without it must follow those that write `cos`, `sin` and
    `slots`.
    """
    num_rows, heads = qkv.shape[0], qkv.shape[1] // layer.head_dim
    if not num_rows:
        return
    rope_kv_kernel[(num_rows, -(-heads // _HEADS_PER_PROGRAM))](
        qkv,
        layer.pages,
        layer.token_scales,
        layer.head_scales,
        cos,
        sin,
        slots,
        None if norm is None else norm.query,
        None if norm is None else norm.key,
        qkv.stride(0),
        cos.stride(0),
        0.0 if norm is None else norm.eps,
        NUM_HEADS=heads - 2 * layer.num_kv_heads,
        NUM_KV_HEADS=layer.num_kv_heads,
        HALF=layer.head_dim // 2,
        BLOCK_SIZE=layer.block_size,
        BLOCK_STRIDE=layer.block_stride,
        SCALE_STRIDE=layer.scale_stride,
        LARGEST=LARGEST_CODE.get(layer.pages.dtype, 0.0),
        BLOCK_HALF=power_of_two(layer.head_dim // 2),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
