"""Prompt scoring on the device: scores the rows of a step that are not sampled from; pools hidden states as well.

Logits are computed for a few rows at a time and discarded, so that a chunk costs no more memory than a batch that
samples. Every rank makes the same calls; only rank 0 uses the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.runner.device_queue import DeviceQueue, Staging
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import Batch, SampledToken
from engine.types.runner import LaunchedStep
from engine.types.step_inputs import IntArray, StepInputs

_SLICE_LOGITS = {"cpu": 2**20, "cuda": 2**23}
"""Logits computed at a time, by device type; several tensors of this size exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScores:
    """Prompt scores of a step's rows, on the device."""

    logprobs: Tensor  # float32 [num_scores]
    ranks: Tensor  # int64 [num_scores]
    top_ids: Tensor  # int64 [num_scores, most]
    top_logprobs: Tensor  # float32 [num_scores, most]
    pooled: Tensor  # float64 [num_vectors, hidden_size]


def score_rows(model: Decoder, hidden: Tensor, inputs: StepInputs, staging: Staging) -> RowScores:
    """Score hidden states before the final norm, `hidden`: first the rows of `inputs.scores`, then those of
    `inputs.pooled`.
    """
    num_scores = len(inputs.scores)
    following = staging.upload(inputs.scores[:, 1].copy()) if num_scores else None
    size = max(1, _SLICE_LOGITS[model.device.type] // model.config.vocab_size)
    parts = []
    for begin in range(0, num_scores, size):
        end = min(num_scores, begin + size)
        logits = model.logits(hidden[begin:end])
        if following is not None and model.is_first_rank:
            parts.append(_scores(logits, following[begin:end], inputs.num_top))
    logprobs, ranks, top_ids, top_logprobs = map(torch.cat, zip(*parts, strict=True)) if parts else [hidden[:0]] * 4
    return RowScores(
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        pooled=_pooled(model, hidden[num_scores:], inputs.pooled, staging) if len(inputs.pooled) else hidden[:0],
    )


def _pooled(model: Decoder, hidden: Tensor, pooled: IntArray, staging: Staging) -> Tensor:
    """Pool hidden states, `[num_pooled, hidden_size]`. Returns float64 `[num_vectors, hidden_size]`."""
    weights = staging.upload(pooled[:, 2].copy()).double()[:, None]
    sizes = np.bincount(pooled[:, 1])
    is_maximum = (pooled[np.cumsum(sizes) - sizes, 2] == 0).tolist()
    counts: list[int] = sizes.tolist()
    states = torch.split(model.final_states(hidden).double(), counts)
    parts = zip(states, torch.split(weights, counts), is_maximum, strict=True)
    return torch.stack([rows.amax(0) if largest else (rows * factors).sum(0) for rows, factors, largest in parts])


def _scores(logits: Tensor, following: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score logits `[num_rows, vocab_size]` by the tokens that follow, `[num_rows]`.

    Returns their log probabilities and ranks, `[num_rows]`, and ids and log probabilities of the most likely tokens,
    `[num_rows, num_top]`.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, following[:, None])
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return own[:, 0], (logprobs > own).sum(dim=-1) + 1, top.indices, top.values


class PendingScores:
    """Implements LaunchedStep for a step in which prompts are scored; `step` has the samples."""

    def __init__(self, step: LaunchedStep, scores: RowScores, batch: Batch, queue: DeviceQueue) -> None:
        """Begin the copies to the host, without waiting. `step`: the same step's samples."""
        self._step = step
        shares = [
            (request.scoring, start, num_tokens)
            for request, start, num_tokens, *_ in batch.items
            if request.scoring is not None and request.scoring.rows(start, num_tokens)
        ]
        self._scoring = [(one, one.num_entries(*rows)) for one, *rows in shares if one.num_top is not None]
        self._pooling = [
            (one, len(one.rows(*rows)), [place for place, _ in one.pooled_rows(*rows)])
            for one, *rows in shares
            if one.num_top is None
        ]
        self._scores = [
            queue.download(tensor) for tensor in (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        ]
        self._pooled = queue.download(scores.pooled)

    def is_over(self) -> bool:
        return self._step.is_over() and self._pooled.is_here()

    def tokens(self) -> Sequence[SampledToken | None]:
        """Wait for the step. When this returns, the scores of its rows have been added to their requests' `scoring`."""
        tokens = self._step.tokens()
        scores = [download.wait() for download in self._scores]
        at = 0
        for scoring, count in self._scoring:
            _add_scores(scoring, [tensor[at : at + count] for tensor in scores])
            at += count
        vectors = iter(self._pooled.wait().tolist())
        for scoring, count, places in self._pooling:
            scoring.pool(count, [(place, next(vectors)) for place in places])
        return tokens


def _add_scores(scoring: PromptScoringState, rows: Sequence[Tensor]) -> None:
    logprobs, ranks, top_ids, top_logprobs = rows
    num_top = scoring.num_top or 0
    scoring.scored(
        len(logprobs),
        logprobs=logprobs.tolist(),
        ranks=ranks.tolist(),
        top_ids=top_ids[:, :num_top].flatten().tolist(),
        top_logprobs=top_logprobs[:, :num_top].flatten().tolist(),
    )
