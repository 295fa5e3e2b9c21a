"""The two heavy steps of sampling behind a small Protocol, and their reference in plain torch.

`draw` is a pure function of a row's logits and its DrawParams: temperature, min-p, top-k, top-p, then the largest of
logits plus Gumbel noise (Gumbel, 1954), which samples the softmax exactly. Cut-offs are by value: tokens tied with
the last one kept are kept, so that no sort order matters.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.philox import gumbel_noise

_NEVER = float("-inf")
_MAX_NOISE_ELEMENTS = 2**20
"""Noise made at a time: sixteen rows of a vocabulary of 65,536, or the integers of the noise would dwarf the logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawParams:
    """How each row draws; on the logits' device, each `[num_rows]`."""

    temperature: Tensor  # float32, above zero
    min_p: Tensor  # float32, 0 is off
    top_p: Tensor  # float32, 1 is off
    top_k: Tensor  # int64, below 1 is off
    seed: Tensor  # int64
    position: Tensor  # int64, in the output
    choice: Tensor  # int64

    def rows(self, begin: int, end: int) -> "DrawParams":
        """A run of rows."""
        return DrawParams(**{name: getattr(self, name)[begin:end] for name in self.__slots__})


class SamplingKernels(Protocol):
    """What the sampler asks of a device. Both leave the logits, float32 `[num_rows, vocab_size]`, as they are."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's largest value, the lowest of equal ones: int64 `[num_rows]`."""
        ...

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        """One token per row: int64 `[num_rows]`."""
        ...


class TorchSampling:
    """Reference; on the CPU with numpy where that is several times as fast."""

    def argmax(self, logits: Tensor) -> Tensor:
        """See SamplingKernels."""
        if logits.device.type == "cpu":
            return torch.from_numpy(logits.numpy().argmax(axis=-1))
        return logits.argmax(dim=-1)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        """See SamplingKernels."""
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


def _truncate_(logits: Tensor, params: DrawParams) -> None:
    """Ban, in place, what min-p, top-k and top-p cut off."""
    if bool((params.min_p > 0.0).any()):
        least = logits.amax(dim=-1, keepdim=True) + params.min_p[:, None].log()  # log(0) is -inf: keeps all
        logits.masked_fill_(logits < least, _NEVER)
    vocab_size = logits.shape[-1]
    keep = torch.where((params.top_k > 0) & (params.top_k < vocab_size), params.top_k, vocab_size)
    nucleus = bool((params.top_p < 1.0).any())
    widest = int(keep.max())
    if widest == vocab_size and not nucleus and int(keep.min()) == vocab_size:
        return
    ordered = logits.topk(widest, dim=-1).values if widest < vocab_size else _descending(logits)
    cutoff = ordered.gather(-1, keep[:, None] - 1)
    if nucleus:
        ordered = ordered.masked_fill(ordered < cutoff, _NEVER)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        top_p = params.top_p[:, None]
        kept = (before < top_p) | (top_p >= 1.0)  # rounding must not cut a row that asked for all
        kept[:, 0] = True
        smallest = ordered.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
        cutoff = torch.maximum(cutoff, smallest)
    logits.masked_fill_(logits < cutoff, _NEVER)


def _descending(scores: Tensor) -> Tensor:
    """Each row's values, largest first; on the CPU by numpy, which is several times as fast at it."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.neg().numpy(), axis=-1)).neg_()
    return scores.sort(dim=-1, descending=True).values
