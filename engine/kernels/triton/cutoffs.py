"""Top-k and top-p by value, without sorting a vocabulary and with hardly a second look at it.

Each row's logits are read once, in groups of neighbouring tokens, and only the largest of each group is kept. Whatever
is looked for after that lies in groups whose largest is high enough, and those alone are listed and read again.

Top-k: the k-th largest of the groups' largest is at most the k-th largest logit, since k groups hold a logit as large;
so groups below it hold nothing that is kept. The k-th largest itself is found among the listed groups. Both by
bisection of order-preserving integers.

Top-p: a token is kept when the tokens above it hold less than `top_p` of the probability, which is cheap to check for
one token. So the winner of the draw among all is checked; if it is cut off, so is everything not above it, and the
winner among the tokens above it is next (rejection, as in FlashInfer's samplers; Ye et al., 2025). The first to pass is
the winner among all that are kept. The first winner passes with probability `top_p` at least, and each one that fails
leaves, on average, half of the rest; so one or two checks are usual.
"""

import triton
import triton.language as tl

from engine.kernels.triton.noise import gumbel_of, uniform_tile

LEAST = tl.constexpr(-2139095040)
"""Order of the lowest finite float."""
NOWHERE = tl.constexpr(2**31 - 1)
"""A token that no vocabulary has."""


@triton.jit
def order_of(x):
    """Integers, int32, in the same order as the floats; zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scaled(x, temperature):
    """Logits divided by the temperature, rounded as torch does."""
    return tl.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def first_of(found, tokens):
    """The lowest token where `found` is true."""
    return tl.min(tl.where(found, tokens, NOWHERE), 0)


@triton.jit
def draw(x, tokens, quads, position, choice, seed, peak, best, winner):
    """The largest of logits plus noise and of `best`, with its token; of equal ones, the lowest token. `quads`: token
    // 4 of every fourth token; `peak`: the logits' largest, or more; not infinite.

    Noise is dear, so few tokens get it: x - log(v), v the uniform variate, is cheap to compare, and no less than the
    logit with noise, x - log(-log(1 - v)). So tokens are tried in the order of that bound until none can win.
    """
    # The condition makes the compiler hold the variates as it holds the logits; those that it replaces are not used.
    variates = tl.where(x > float("-inf"), uniform_tile(quads, position, choice, seed), 1.0)
    bounds = variates * tl.exp(tl.minimum(peak - x, 87.0))  # exp(peak - bound): the lowest is tried first
    lowest = tl.min(bounds, 0)
    limit = _limit(peak, best)
    while lowest < limit:
        token = first_of(bounds == lowest, tokens)
        here = tokens == token
        noise = gumbel_of(tl.max(tl.where(here, variates, 0.0), 0))
        y = tl.max(tl.where(here, x, float("-inf")), 0) + noise
        winner = tl.where((y > best) | ((y == best) & (token < winner)), token, winner)
        best = tl.maximum(best, y)
        limit = _limit(peak, best)
        bounds = tl.where(here, float("inf"), bounds)
        lowest = tl.min(bounds, 0)
    return best, winner


@triton.jit
def _limit(peak, best):
    """What `bounds` of tokens that may reach `best` are less than, with room for rounding.

    Noise lies between -3 and 23: so logits 60 below the peak never win, and bounds of those 87 below, of minus infinity
    too, exceed exp(60).
    """
    return tl.exp(tl.minimum(peak - best + (1e-3 + tl.abs(best) * 2.4e-7), 60.0))


@triton.jit
def list_groups(orders, least, listed_ptr, BLOCK: tl.constexpr):
    """Write the numbers of groups whose largest logit's order is `least` or more, ascending; returns how many."""
    chosen = (orders >= least).to(tl.int32)
    tl.debug_barrier()  # the last list has been read
    tl.store(listed_ptr + tl.cumsum(chosen, 0) - 1, tl.arange(0, BLOCK), mask=chosen > 0)
    tl.debug_barrier()  # any thread may read what another has written
    return tl.sum(chosen, 0)


@triton.jit
def _listed_group(listed_ptr, index, num_listed, PER_GROUP: tl.constexpr):
    """Index of an element of a list's groups, `PER_GROUP` elements each, in the row; beyond the list, a huge one."""
    place = index // PER_GROUP
    group = tl.load(listed_ptr + place, mask=place < num_listed, other=NOWHERE // PER_GROUP - 1)
    return group * PER_GROUP + index % PER_GROUP


@triton.jit
def _listed_logits(x_ptr, size, temperature, listed_ptr, num_listed, begin, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens `begin .. begin + BLOCK` of the listed groups, and their scaled logits; minus infinity beyond them."""
    tokens = _listed_group(listed_ptr, begin + tl.arange(0, BLOCK), num_listed, GROUP)
    return tokens, scaled(tl.load(x_ptr + tokens, mask=tokens < size, other=float("-inf")), temperature)


@triton.jit
def kth_bound(orders, count, most, k, BLOCK: tl.constexpr):
    """A bound that `k` or a few more of the first `count` orders reach; LEAST when there are not so many. None reaches
    `most`.
    """
    valid = tl.arange(0, BLOCK) < count
    most = tl.where(k > count, LEAST, most)
    least = tl.minimum(tl.min(tl.where(valid, orders, most), 0), most)
    bound = (least & most) + ((least ^ most) >> 1)
    while bound > least:
        reached = tl.sum((orders >= bound).to(tl.int32), 0)
        least = tl.where(reached >= k, bound, least)
        most = tl.where(reached > k + k // 4, most, bound)
        bound = (least & most) + ((least ^ most) >> 1)
    return least


@triton.jit
def kth_listed(
    x_ptr, size, temperature, listed_ptr, num_listed, least, most, k, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest order from `least` on, and below `most`, that `k` tokens of the listed groups reach; `least` if none
    is. An order between the `k` tokens and the next one, where that is found sooner.
    """
    bound = (least & most) + ((least ^ most) >> 1)
    while bound > least:
        tally = tl.zeros([BLOCK], tl.int32)
        for begin in tl.range(0, num_listed * GROUP, BLOCK):
            _, x = _listed_logits(x_ptr, size, temperature, listed_ptr, num_listed, begin, GROUP, BLOCK)
            tally += (order_of(x) >= bound).to(tl.int32)
        reached = tl.sum(tally, 0)
        least = tl.where(reached >= k, bound, least)
        most = tl.where(reached > k, most, bound)
        bound = (least & most) + ((least ^ most) >> 1)
    return least


@triton.jit
def mass_listed(
    x_ptr, size, temperature, listed_ptr, num_listed, least, peak, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of exp(x - peak) over tokens of the listed groups whose order is `least` or more."""
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, num_listed * GROUP, BLOCK):
        _, x = _listed_logits(x_ptr, size, temperature, listed_ptr, num_listed, begin, GROUP, BLOCK)
        mass += tl.where(order_of(x) >= least, tl.exp(x - peak), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def draw_listed(
    x_ptr, size, temperature, position, choice, seed, listed_ptr, num_listed, least, peak, best, winner,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of the largest of `best`, which is `winner`'s, and of logits plus noise of the listed groups' tokens
    whose order is `least` or more.
    """
    for begin in tl.range(0, num_listed * GROUP, BLOCK):
        tokens, x = _listed_logits(x_ptr, size, temperature, listed_ptr, num_listed, begin, GROUP, BLOCK)
        x = tl.where(order_of(x) >= least, x, float("-inf"))
        quads = _listed_group(listed_ptr, begin // 4 + tl.arange(0, BLOCK // 4), num_listed, GROUP // 4)
        best, winner = draw(x, tokens, quads, position, choice, seed, peak, best, winner)
    return winner
