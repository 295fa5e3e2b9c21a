"""Philox4x32-10: random words as a pure function of a counter and a key (Salmon et al., SC'11).

Integer arithmetic only, so every device gives the same words. Unsigned 32-bit lanes live in int64 tensors; their
64-bit products may wrap into the sign bit, which masking after the shift undoes.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words per counter: int64 tensors holding 32-bit values, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c1 = p1 & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c3 = p0 & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[num_rows, vocab_size]`, from int64 `[num_rows]` tensors.

    Key: the seed's low and high words. Counter: (token // 4, position in the output, choice, 0); token % 4 picks
    the word. So the noise of a token depends on nothing else: not on the batch, the worker, or the past.
    """
    quads = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seeds.device)[None, :]
    rows = (positions & _MASK, choices & _MASK, torch.zeros_like(seeds))
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    words = philox4x32(
        (quads, rows[0][:, None], rows[1][:, None], rows[2][:, None]), (key[0][:, None], key[1][:, None])
    )
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # The small end of `v` decides who wins, and float32 is finest there; the large end is kept below one.
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
