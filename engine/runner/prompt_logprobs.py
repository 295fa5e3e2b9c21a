"""Prompt logprobs on the device: scores the rows of a step that are not sampled from; sums hidden states as well.

Logits are computed for a few rows at a time and discarded, so that a chunk costs no more memory than a batch that
samples. Every rank makes the same calls; only rank 0 uses the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.runner.device_queue import DeviceQueue, Staging
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import Batch, SampledToken
from engine.types.runner import LaunchedStep
from engine.types.step_inputs import StepInputs

_SLICE_LOGITS = {"cpu": 2**20, "cuda": 2**23}
"""Logits computed at a time, by device type; several tensors of this size exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScores:
    """Prompt scores of a step's rows, on the device."""

    logprobs: Tensor  # float32 [num_scores]
    ranks: Tensor  # int64 [num_scores]
    top_ids: Tensor  # int64 [num_scores, most]
    top_logprobs: Tensor  # float32 [num_scores, most]
    sums: Tensor  # float64 [num_pooling, hidden_size]


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
    counts = torch.bincount(torch.from_numpy(inputs.pooled[:, 1])).tolist() if len(inputs.pooled) else []
    states = model.final_states(hidden[num_scores:]) if counts else hidden[:0]
    sums = [rows.sum(0, dtype=torch.float64) for rows in torch.split(states, counts)] if counts else []
    logprobs, ranks, top_ids, top_logprobs = map(torch.cat, zip(*parts, strict=True)) if parts else [hidden[:0]] * 4
    return RowScores(
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        sums=torch.stack(sums) if sums else hidden[:0],
    )


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
            (request.scoring, len(request.scoring.rows(start, num_tokens)))
            for request, start, num_tokens, *_ in batch.items
            if request.scoring is not None
        ]
        self._scoring = [(one, count) for one, count in shares if one.num_top is not None and count]
        self._pooling = [(one, count) for one, count in shares if one.num_top is None and count]
        self._scores = [
            queue.download(tensor) for tensor in (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        ]
        self._sums = queue.download(scores.sums)

    def is_over(self) -> bool:
        return self._step.is_over() and self._sums.is_here()

    def tokens(self) -> Sequence[SampledToken | None]:
        """Wait for the step. When this returns, the scores of its rows have been added to their requests' `scoring`."""
        tokens = self._step.tokens()
        scores = [download.wait() for download in self._scores]
        at = 0
        for scoring, count in self._scoring:
            _add_scores(scoring, [tensor[at : at + count] for tensor in scores])
            at += count
        for (scoring, count), total in zip(self._pooling, self._sums.wait().tolist(), strict=True):
            scoring.pooled(count, total)
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
