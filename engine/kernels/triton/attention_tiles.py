"""Shared parts of prefill and decode attention: one run over cached keys, and the merging of two runs.

Online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022) in base two. The state of a tile of rows is `(largest,
total, acc)`: the largest score so far times log2(e), the sum of weights relative to it, and the weighted sum of
values. A tile of keys that a row does not attend to leaves its state as it was, bit for bit: its weights are exact
zeros. So where a row's tiles begin and end at fixed positions, its result does not depend on the rows beside it.
"""

import triton
import triton.language as tl


@triton.jit
def attend_keys(
    state, queries, positions, pages_ptr, scales_ptr, table_ptr, kv_head, begin, end, score_scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attend over keys `begin..end`, `begin` a multiple of BLOCK_N; unless MASKED, every row attends to all of them.

    score_scale: above zero. SOFT_CAP: bound that scaled scores are bent to, in base two; 0: none. scales_ptr: scales of
    tokens. With one scale per head, `score_scale` includes the keys', and the caller must apply the values' to the
    result.
    """
    largest, total, acc = state
    BLOCK_D: tl.constexpr = queries.shape[1]
    dims = tl.arange(0, BLOCK_D)
    rest_scale = 1.0 if SOFT_CAP > 0.0 else score_scale
    for first in tl.range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        inside = keys < end
        # Caches often have more than 2^31 elements: offsets are computed in 64 bits from the block's number on.
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        line = kv_head * BLOCK_SIZE + keys % BLOCK_SIZE
        loaded = inside[:, None] & (dims < HEAD_DIM)[None, :]
        where = pages_ptr + (block * BLOCK_STRIDE + line * HEAD_DIM)[:, None] + dims[None, :]
        key = tl.load(where, mask=loaded, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
        if scales_ptr is not None:
            scale_where = scales_ptr + block * SCALE_STRIDE + line
            scores *= tl.load(scale_where, mask=inside, other=0.0)[None, :]
        if SOFT_CAP > 0.0:
            # The hyperbolic tangent by the exponential function, which is infinite where the quotient is zero.
            scores = SOFT_CAP - 2.0 * SOFT_CAP / (tl.exp2(scores * (score_scale * 2.8853900817779268 / SOFT_CAP)) + 1.0)
        if MASKED:
            visible = inside[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        # Scaled here and not before: multiplication and subtraction are one operation.
        higher = tl.maximum(largest, tl.max(scores, 1) * rest_scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
        weights = tl.exp2(scores * rest_scale - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(where + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=loaded, other=0.0)
        if scales_ptr is not None:
            # Scaled before the product: a weight times a small scale would underflow in float16.
            scale = tl.load(scale_where + NUM_KV_HEADS * BLOCK_SIZE, mask=inside, other=0.0)
            value = value.to(tl.float32) * scale[:, None]
        acc = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, acc


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """State of rows that have attended to no key."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return largest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def merge_states(state, other):
    """The state after both runs; with an empty `other`, `state` itself, bit for bit.

    Vectors of any one shape: `[..., BLOCK_D]` in the third place, and without that dimension before. The additions
    are explicitly fused; where bits matter, kernels are compiled without fusing others, so that all round alike.
    """
    largest, total, acc = state
    other_largest, other_total, other_acc = other
    higher = tl.maximum(largest, other_largest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, other_shrink = tl.exp2(largest - base), tl.exp2(other_largest - base)
    total = tl.fma(total, shrink, other_total * other_shrink)
    if len(largest.shape) > 0:
        shrink, other_shrink = shrink[:, None], other_shrink[:, None]
    acc = tl.fma(acc, tl.broadcast_to(shrink, acc.shape), other_acc * other_shrink)
    return higher, total, acc


@triton.jit
def first_key_of(position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Position at which the tiles of a row at `position` begin: the first tile with keys in its window."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        return position * 0
