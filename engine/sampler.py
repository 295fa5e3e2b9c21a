"""From logits to tokens: a function of logits and Request alone, so that any worker continues any request alike.

Order, as in vLLM: log-probabilities of the untouched logits; banned and biased tokens; penalties; temperature;
min-p; top-k; top-p; then a draw with noise fixed by (seed, choice, position) alone (`engine.sampling_kernels`).
Greedy rows skip everything from the temperature on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.request import Request, SampledToken, TokenLogprob
from engine.sampling_kernels import DrawParams, SamplingKernels, TorchSampling
from tandem.sampling import SamplingParams

_NEVER = float("-inf")
_MAX_GROUP_ELEMENTS = 2**20
"""Logits handled together: penalties and log-probabilities take several times their memory, at every batch size."""


class Sampler:
    """Chooses one token per row; keeps no state between steps."""

    def __init__(
        self,
        *,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`kernels`: of the device; plain torch when absent."""
        self._kernels = kernels or TorchSampling()
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = torch.device(device)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """One token for each row of float32 `[num_rows, vocab_size]` logits, which are left as they are."""
        if logits.shape[0] == 0:
            return []
        group = max(1, _MAX_GROUP_ELEMENTS // logits.shape[1])
        tokens: list[SampledToken] = []
        for begin in range(0, len(requests), group):
            tokens += self._sample_group(logits[begin : begin + group], requests[begin : begin + group])
        return tokens

    def _sample_group(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        adjusted = self._adjust(logits, requests)
        random_rows = [i for i, request in enumerate(requests) if not request.params.greedy]
        if len(random_rows) == len(requests):
            chosen = self._draw(adjusted, requests)
        else:
            chosen = self._kernels.argmax(adjusted)
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
        return self._kernels.draw(
            logits,
            DrawParams(
                temperature=self._floats([p.temperature for p in params]),
                min_p=self._floats([p.min_p for p in params]),
                top_p=self._floats([p.top_p for p in params]),
                top_k=self._tensor([p.top_k for p in params]),
                seed=self._tensor([p.seed for p in params]),
                position=self._tensor([request.num_output_tokens for request in requests]),
                choice=self._tensor([request.choice_index for request in requests]),
            ),
        )

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


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
