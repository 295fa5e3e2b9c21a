"""From logits to tokens: a function of logits and Request alone, so that any worker continues any request alike.

Order, as in vLLM: log-probabilities of the untouched logits; banned and biased tokens; penalties; temperature;
min-p; top-k; top-p; then the largest of logits plus Gumbel noise, which samples the softmax exactly (Gumbel, 1954)
with noise fixed by (seed, choice, position). Greedy rows skip everything from the temperature on. Cut-offs are by
value: tokens tied with the last one kept are kept, so that no sort order matters.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.philox import gumbel_noise
from engine.request import Request, SampledToken, TokenLogprob
from tandem.sampling import SamplingParams

_NEVER = float("-inf")


class Sampler:
    """Chooses one token per row; keeps no state between steps."""

    def __init__(self, *, eos_token_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = torch.device(device)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """One token for each row of float32 `[num_rows, vocab_size]` logits, which are left as they are."""
        adjusted = self._adjust(logits, requests)
        random_rows = [i for i, request in enumerate(requests) if not request.params.greedy]
        if len(random_rows) == len(requests):
            chosen = self._draw(adjusted, requests)
        else:
            chosen = _argmax(adjusted)
            if random_rows:
                rows = self._tensor(random_rows)
                chosen[rows] = self._draw(adjusted[rows], [requests[i] for i in random_rows])
        tokens = [SampledToken(token_id=token) for token in chosen.tolist()]
        self._add_logprobs(tokens, logits, requests)
        return tokens

    def _adjust(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Bans, biases and penalties, on a copy if there are any."""
        biases = [
            (row, token, bias)
            for row, request in enumerate(requests)
            if request.params.logit_bias
            for token, bias in request.params.logit_bias.items()
        ]
        bans = [(row, token) for row, request in enumerate(requests) for token in self._banned(request)]
        penalised = [row for row, request in enumerate(requests) if _has_penalties(request.params)]
        if not (biases or bans or penalised):
            return logits
        adjusted = logits.clone()
        if biases:
            rows, tokens, values = zip(*biases, strict=True)
            adjusted[self._tensor(rows), self._tensor(tokens)] += self._floats(values)
        if bans:
            rows, tokens = zip(*bans, strict=True)
            adjusted[self._tensor(rows), self._tensor(tokens)] = _NEVER
        if penalised:
            self._penalise(adjusted, penalised, requests)
        return adjusted

    def _banned(self, request: Request) -> tuple[int, ...]:
        """Tokens that would end the choice before its `min_tokens`."""
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            return ()
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self._eos_token_ids

    def _penalise(self, logits: Tensor, rows: list[int], requests: Sequence[Request]) -> None:
        """Repetition counts prompt and output (Keskar et al., 2019); presence and frequency count output only."""
        chosen = [requests[row] for row in rows]
        params = [request.params for request in chosen]
        every = self._counts(chosen, logits.shape[-1], output_only=False)
        output = self._counts(chosen, logits.shape[-1], output_only=True)
        index = self._tensor(rows)
        part = logits[index]  # [num_penalised, vocab_size]
        repetition = self._floats([p.repetition_penalty for p in params])[:, None]
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(every > 0, repeated, part)
        part -= self._floats([p.frequency_penalty for p in params])[:, None] * output
        part -= self._floats([p.presence_penalty for p in params])[:, None] * (output > 0)
        logits[index] = part

    def _counts(self, requests: Sequence[Request], vocab_size: int, *, output_only: bool) -> Tensor:
        """How often each token stands in each request: float32 `[num_requests, vocab_size]`."""
        tokens = []
        for request in requests:
            ids = request.token_ids
            start = request.num_prompt_tokens if output_only else 0
            tokens.append(np.array(ids[start:], dtype=np.int64))
        lengths = [len(part) for part in tokens]
        rows = np.repeat(np.arange(len(requests), dtype=np.int64), lengths)
        flat = torch.from_numpy(rows * vocab_size + np.concatenate(tokens)).to(self._device)
        counts = torch.zeros(len(requests) * vocab_size, dtype=torch.float32, device=self._device)
        counts.index_add_(0, flat, torch.ones(len(flat), dtype=torch.float32, device=self._device))
        return counts.view(len(requests), vocab_size)

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        params = [request.params for request in requests]
        logits = logits / self._floats([p.temperature for p in params])[:, None]
        self._truncate_(logits, params)
        noise = gumbel_noise(
            self._tensor([p.seed for p in params]),
            self._tensor([request.num_output_tokens for request in requests]),
            self._tensor([request.choice_index for request in requests]),
            logits.shape[-1],
        )
        return _argmax(noise.add_(logits))

    def _truncate_(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        """Ban, in place, what min-p, top-k and top-p cut off."""
        if any(p.min_p > 0.0 for p in params):
            share = self._floats([p.min_p for p in params])[:, None]  # log(0) is -inf: keeps all
            logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + share.log(), _NEVER)
        vocab_size = logits.shape[-1]
        keep = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        nucleus = any(p.top_p < 1.0 for p in params)
        widest = max(keep)
        if widest == vocab_size and not nucleus and min(keep) == vocab_size:
            return
        ordered = logits.topk(widest, dim=-1).values if widest < vocab_size else _descending(logits)
        last = self._tensor(keep)[:, None] - 1
        cutoff = ordered.gather(-1, last)
        if nucleus:
            ordered = ordered.masked_fill(ordered < cutoff, _NEVER)
            probabilities = ordered.softmax(dim=-1)
            before = probabilities.cumsum(dim=-1) - probabilities
            top_p = self._floats([p.top_p for p in params])[:, None]
            kept = (before < top_p) | (top_p >= 1.0)  # rounding must not cut a row that asked for all
            kept[:, 0] = True
            smallest = ordered.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
            cutoff = torch.maximum(cutoff, smallest)
        logits.masked_fill_(logits < cutoff, _NEVER)

    def _add_logprobs(self, tokens: list[SampledToken], logits: Tensor, requests: Sequence[Request]) -> None:
        """Replace, in place, the tokens whose requests want log-probabilities."""
        wanted = [
            (row, request.params.num_logprobs)
            for row, request in enumerate(requests)
            if request.params.num_logprobs is not None
        ]
        if not wanted:
            return
        rows = [row for row, _ in wanted]
        logprobs = logits[self._tensor(rows)].log_softmax(dim=-1)
        sampled = self._tensor([tokens[row].token_id for row in rows])
        own = logprobs.gather(-1, sampled[:, None])[:, 0].tolist()
        most = min(max(count for _, count in wanted), logits.shape[-1])
        top = logprobs.topk(most, dim=-1)
        top_ids, top_values = top.indices.tolist(), top.values.tolist()
        for i, (row, count) in enumerate(wanted):
            pairs = list(zip(top_ids[i], top_values[i], strict=True))[:count]
            tokens[row] = SampledToken(
                token_id=tokens[row].token_id,
                logprob=own[i],
                top_logprobs=tuple(TokenLogprob(token_id=t, logprob=v) for t, v in pairs),
            )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def _argmax(scores: Tensor) -> Tensor:
    """Index of each row's largest value; on the CPU by numpy, which is twenty times as fast at it."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _descending(scores: Tensor) -> Tensor:
    """Each row's values, largest first; on the CPU by numpy, which is several times as fast at it."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.neg().numpy(), axis=-1)).neg_()
    return scores.sort(dim=-1, descending=True).values


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
