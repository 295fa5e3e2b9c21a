"""Top-k and top-p by value, without sorting a vocabulary.

Top-k: the k-th largest value by radix selection, eight bits of an order-preserving integer at a time; four passes.

Top-p: a token is kept when the tokens above it hold less than `top_p` of the probability, which is cheap to check for
one token. So the winner of the draw among all is checked; if it is cut off, so is everything not above it, and the
winner among the tokens above it is next (rejection, as in FlashInfer's samplers; Ye et al., 2025). The first to pass is
the winner among all that are kept. The first winner passes with probability `top_p` at least, and each one that fails
leaves, on average, half of the rest; so a pass or two is usual.
"""

import triton
import triton.language as tl


@triton.jit
def _order_of(x):
    """Integers, uint32, in the same order as the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ tl.full([], 0x80000000, tl.uint32)


@triton.jit
def kth_largest(x_ptr, size, k, BLOCK: tl.constexpr):
    """The k-th largest of `size` floats, 1 <= k <= size."""
    digits = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.uint32)
    wanted = k
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for begin in tl.range(0, size, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            inside = index < size
            order = _order_of(tl.load(x_ptr + index, mask=inside, other=0.0))
            if step > 0:
                inside = inside & (order >> (shift + 8) == prefix)
            histogram += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=inside)
        total = tl.sum(histogram, 0)
        at_least = total - tl.cumsum(histogram, 0) + histogram  # elements whose digit is this or higher
        digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        wanted = wanted - tl.sum(tl.where(digits > digit, histogram, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    signed = (prefix ^ tl.full([], 0x80000000, tl.uint32)).to(tl.int32, bitcast=True)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_above(x_ptr, y_ptr, size, bound, peak, STRICT: tl.constexpr, BLOCK: tl.constexpr):
    """Among tokens with x >= bound (STRICT: above it): the sum of exp(x - peak), and the first where y is largest.

    Third, whether the row is usable: there were such tokens, and no value of the row is NaN or infinity.
    """
    broken = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    where = tl.full([], 0, tl.int32)
    for begin in tl.range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < size, other=float("-inf"))
        broken += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)  # noqa: PLR0124 - NaN alone
        kept = (x > bound) if STRICT else ((x >= bound) & (x > float("-inf")))
        mass += tl.sum(tl.where(kept, tl.exp(x - peak), 0.0), 0)
        y = tl.load(y_ptr + index, mask=kept, other=float("-inf"))
        highest, at = tl.max(y, 0, return_indices=True, return_indices_tie_break_left=True)
        where = tl.where(highest > best, begin + at, where)
        best = tl.maximum(best, highest)
    return mass, where, (broken == 0) & (best > float("-inf"))


@triton.jit
def largest_of(x_ptr, size, BLOCK: tl.constexpr):
    """The largest of `size` floats."""
    peak = tl.full([], float("-inf"), tl.float32)
    for begin in tl.range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(tl.load(x_ptr + index, mask=index < size, other=float("-inf")), 0))
    return peak
