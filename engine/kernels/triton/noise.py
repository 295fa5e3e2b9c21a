"""Gumbel noise by counter on the device: the words of `engine.sampling.backend`, and the same noise up to rounding.

The logarithms are computed here: the hardware's have an absolute error of 2^-22, which near one leaves no correct
digit, and the smallest uniform variates, whose logarithms those are, decide the winner of a draw.
"""

import triton
import triton.language as tl


@triton.jit
def philox_words(quad, position, choice, key_low, key_high):
    """Philox4x32-10 (Salmon et al., 2011) on the counter (quad, position, choice, 0): four uint32 words of `quad`."""
    c0 = quad.to(tl.uint32)
    c1, c2, c3 = (c0 * 0 + position).to(tl.uint32), (c0 * 0 + choice).to(tl.uint32), c0 * 0
    k0, k1 = key_low, key_high
    first: tl.constexpr = 0xD2511F53
    second: tl.constexpr = 0xCD9E8D57
    for number in tl.static_range(10):
        if number > 0:
            k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
            k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
        p0, p1 = c0.to(tl.uint64) * first, c2.to(tl.uint64) * second
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def accurate_log(x):
    """Natural logarithm of positive normal float32, to about one unit in the last place.

    x = 2^e m with m within a factor of sqrt(2) of one; log(m) = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
    """
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # bits of sqrt(1/2): makes m below lie in [sqrt(1/2), sqrt(2))
    exponent = (bits >> 23).to(tl.float32)
    m = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909))))
    return exponent * 0.693145751953125 + (2.0 * s + (2.0 * s * series + exponent * 1.428606765330187e-06))


@triton.jit
def uniform_tile(quads, position, choice, seed):
    """Uniform variates in (0, 1), finest near zero, of four tokens for each element of `quads`, token // 4, in order:
    token % 4 picks the word of a quad.
    """
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(quads, position, choice, key_low, key_high)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32; 1 - 2^-24


@triton.jit
def gumbel_of(v):
    """Standard Gumbel noise of uniform variates: -log(-log(1 - v))."""
    # log(1 - v) = -2 artanh(v / (2 - v)): exact for small v, where 1 - v would drop its digits.
    s = v / (2.0 - v)
    z = s * s
    near = 2.0 * s + 2.0 * s * z * (0.33333333 + z * (0.2 + z * (0.14285714 + z * 0.11111111)))
    exponential = tl.where(v < 0.25, near, -accurate_log(1.0 - v))
    return -accurate_log(exponential)
