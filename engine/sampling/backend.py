"""The device operations of sampling: a small Protocol, and its reference in plain torch.

Every token is a pure function of a row's logits and its sampling parameters: biases and bans, penalties, temperature,
min-p, top-k, top-p, then the largest of logits plus Gumbel noise (Gumbel, 1954), which samples the softmax exactly.
Cut-offs are by value: tokens tied with the last one kept are kept, so that the result depends on no sort order.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.sampling.token_counts import Penalties

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
    the word. So the noise of a token depends on nothing else: not on the batch, the worker, or earlier tokens.
    """
    quads = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seeds.device)[None, :]
    rows = (positions & _MASK, choices & _MASK, torch.zeros_like(seeds))
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    words = philox4x32(
        (quads, rows[0][:, None], rows[1][:, None], rows[2][:, None]), (key[0][:, None], key[1][:, None])
    )
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # Small values of `v` decide the winner, and float32 is finest there; large values are kept below one.
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


_BANNED = float("-inf")
_MAX_NOISE_ELEMENTS = 2**20
"""Elements of noise made at a time: more, in integers of 64 bits, would take far more memory than the logits."""

UNUSABLE = -1
"""Stands for a token, on the device, where none can be chosen from a row's logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawParams:
    """Sampling parameters of each row; on the logits' device, each `[num_rows]`."""

    temperature: Tensor  # float32; 0: the largest, and nothing else counts
    min_p: Tensor  # float32, 0 is off
    top_p: Tensor  # float32, 1 is off
    top_k: Tensor  # int64, below 1 is off
    seed: Tensor  # int64
    position: Tensor  # int64, in the output
    choice: Tensor  # int64

    def rows(self, begin: int, end: int) -> "DrawParams":
        """Parameters of the rows from `begin` to `end`."""
        return DrawParams(**{name: getattr(self, name)[begin:end] for name in self.__slots__})

    def pick(self, rows: Tensor) -> "DrawParams":
        """Parameters of the rows with these indices, int64."""
        return DrawParams(**{name: getattr(self, name)[rows] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitEdits:
    """Values to add to logits: biases, and minus infinity for banned tokens; in any order, each added once."""

    rows: Tensor  # int32 [num_edits]; negative: padding
    token_ids: Tensor  # int32 [num_edits]
    values: Tensor  # float32 [num_edits]


class SamplingKernels(Protocol):
    """Device operations that the sampler needs. Logits are float32 `[num_rows, vocab_size]`; only `forbid_` changes
    them.
    """

    def choose(
        self,
        logits: Tensor,
        params: DrawParams | None,
        *,
        penalties: Penalties | None = None,
        edits: LogitEdits | None = None,
    ) -> Tensor:
        """Choose one token per row, int64 `[num_rows]`; UNUSABLE where a row holds NaN or infinity, or nothing finite.

        `params` None: the largest of each row, the first of equal ones. Chosen tokens are counted in the counts of
        `penalties`, in the rows that it says.
        """
        ...

    def forbid_(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set to minus infinity, in place, the logits of tokens whose bits are not set.

        `rows`: int64 `[num_guided]`, ascending indices of the logits' rows. `bits`: int32
        `[num_guided, (vocab_size + 31) // 32]`, lowest bit first. All are on the logits' device.
        """
        ...


class DrawKernels(Protocol):
    """The two expensive steps of sampling, for rows with usable logits."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's largest value, the lowest of equal ones: int64 `[num_rows]`."""
        ...

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        """Sample one token per row, at temperatures above zero: int64 `[num_rows]`."""
        ...


class TorchSampling:
    """Reference implementation; on the CPU some steps use numpy, which is several times as fast at them."""

    def choose(
        self,
        logits: Tensor,
        params: DrawParams | None,
        *,
        penalties: Penalties | None = None,
        edits: LogitEdits | None = None,
    ) -> Tensor:
        return choose_by_steps(self, logits, params, penalties=penalties, edits=edits)

    def forbid_(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        (forbid_by_numpy_ if logits.device.type == "cpu" else forbid_by_torch_)(logits, rows, bits)

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.device.type == "cpu":
            return torch.from_numpy(logits.numpy().argmax(axis=-1))
        return logits.argmax(dim=-1)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        group = max(1, _MAX_NOISE_ELEMENTS // logits.shape[1])
        parts = [
            self._draw_group(logits[begin : begin + group], params.rows(begin, begin + group))
            for begin in range(0, logits.shape[0], group)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_group(self, logits: Tensor, params: DrawParams) -> Tensor:
        logits = logits / params.temperature[:, None]
        _truncate_(logits, params)
        noise = gumbel_noise(params.seed, params.position, params.choice, logits.shape[-1])
        return self.argmax(noise.add_(logits))


def choose_by_steps(
    kernels: DrawKernels,
    logits: Tensor,
    params: DrawParams | None,
    *,
    penalties: Penalties | None = None,
    edits: LogitEdits | None = None,
) -> Tensor:
    """`SamplingKernels.choose` by torch operators around the two expensive steps. Waits for the device."""
    usable = logits.amax(dim=-1).isfinite()  # NaN, infinity and a row without finite values show in the largest
    if not bool(usable.all()):
        logits = logits.masked_fill(~usable[:, None], 0.0)
    if edits is not None or penalties is not None:
        logits = adjusted(logits, penalties=penalties, edits=edits)
    tokens = _argmax_or_draw(kernels, logits, params)
    if penalties is not None:
        counted = (penalties.is_counted() & usable).nonzero()[:, 0]
        counts, slots = penalties.counts.counts, penalties.slots[counted].to(torch.int64)
        twos = torch.full((len(slots),), 2, dtype=torch.int32, device=slots.device)
        counts.index_put_((slots, tokens[counted]), twos, accumulate=True)
    return tokens.masked_fill_(~usable, UNUSABLE)


def _argmax_or_draw(kernels: DrawKernels, logits: Tensor, params: DrawParams | None) -> Tensor:
    """Take the largest value of greedy rows and sample the others: int64 `[num_rows]`."""
    rows = None if params is None else params.temperature.nonzero()[:, 0]
    if params is None or rows is None or not len(rows):
        return kernels.argmax(logits)
    if len(rows) == len(logits):
        return kernels.draw(logits, params)
    tokens = kernels.argmax(logits)
    tokens[rows] = kernels.draw(logits[rows], params.pick(rows))
    return tokens


def adjusted(logits: Tensor, *, penalties: Penalties | None = None, edits: LogitEdits | None = None) -> Tensor:
    """Copy the logits, with edits and then penalties applied.

    Repetition counts prompt and output (Keskar et al., 2019); presence and frequency count output only.
    """
    logits = logits.clone()
    if edits is not None:
        values = edits.values.masked_fill(edits.rows < 0, 0.0)
        logits.index_put_((edits.rows.clamp(min=0).long(), edits.token_ids.long()), values, accumulate=True)
    if penalties is None:
        return logits
    rows = (penalties.slots >= 0).nonzero()[:, 0]
    part = logits[rows]  # [num_penalised, vocab_size]
    seen = penalties.seen(rows)
    repetition = penalties.repetition[rows, None]
    part = torch.where(seen > 0, torch.where(part > 0, part / repetition, part * repetition), part)
    output = (seen >> 1).to(torch.float32)
    part -= penalties.frequency[rows, None] * output
    part -= penalties.presence[rows, None] * (output > 0)
    logits[rows] = part
    return logits


def forbid_by_numpy_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See SamplingKernels, on the CPU: several small torch operators would cost more than unpacking the bits."""
    values = logits.numpy()
    banned = np.unpackbits(~bits.numpy().view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    for row, ban in zip(rows.tolist(), banned[:, : values.shape[1]], strict=True):
        np.putmask(values[row], ban, _BANNED)


def forbid_by_torch_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    banned = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(banned, _BANNED)


def _truncate_(logits: Tensor, params: DrawParams) -> None:
    """Set to minus infinity, in place, the logits that min-p, top-k and top-p cut off."""
    if bool((params.min_p > 0.0).any()):
        least = logits.amax(dim=-1, keepdim=True) + params.min_p[:, None].log()  # log(0) is -inf: keeps all
        logits.masked_fill_(logits < least, _BANNED)
    vocab_size = logits.shape[-1]
    keep = torch.where((params.top_k > 0) & (params.top_k < vocab_size), params.top_k, vocab_size)
    nucleus = bool((params.top_p < 1.0).any())
    widest = int(keep.max())
    if widest == vocab_size and not nucleus and int(keep.min()) == vocab_size:
        return
    ordered = logits.topk(widest, dim=-1).values if widest < vocab_size else _descending(logits)
    cutoff = ordered.gather(-1, keep[:, None] - 1)
    if nucleus:
        # Logits that equal the k-th are kept too, and top-p's share is of all that are kept: else a row's share would
        # depend on how many the others keep.
        tied = int(((logits >= cutoff) & (logits > _BANNED)).sum(dim=-1).max()) if widest < vocab_size else widest
        if tied > widest:
            ordered = logits.topk(tied, dim=-1).values
        ordered = ordered.masked_fill(ordered < cutoff, _BANNED)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        top_p = params.top_p[:, None]
        kept = (before < top_p) | (top_p >= 1.0)  # rounding must not cut a row with top_p 1
        kept[:, 0] = True
        smallest = ordered.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
        cutoff = torch.maximum(cutoff, smallest)
    logits.masked_fill_(logits < cutoff, _BANNED)


def _descending(scores: Tensor) -> Tensor:
    """Each row's values, largest first; on the CPU by numpy, which is several times as fast."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.neg().numpy(), axis=-1)).neg_()
    return scores.sort(dim=-1, descending=True).values
