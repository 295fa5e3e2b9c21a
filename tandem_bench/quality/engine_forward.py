"""A model as the engine computes it, for quality gates: tokens to logits, and greedy answers.

A prompt runs as in a worker: in chunks, over the paged cache; an answer is decoded token by token over the same cache.
"""

from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.assembly import resolve_quantization
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.config import load_model_config
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.errors import ConfigError
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams

CHUNK = 512
"""Tokens of a prompt that are computed in one step."""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a model is computed; the values are those of the configuration, but `dtype` is never `auto`."""

    dtype: str
    quantization: str = "none"
    kv_dtype: str = "auto"


class EngineForward:
    """A loaded model with a cache for one sequence."""

    def __init__(self, folder: Path, precision: Precision, *, num_threads: int, max_tokens: int | None = None) -> None:
        """Load the model on the CPU. `max_tokens`: longest sequence to make room for; None: the model's context.

        Raises ConfigError when the model cannot be loaded, the precision is not available here, or `max_tokens` is
        more than the context.
        """
        config = load_model_config(folder)
        longest = config.max_context if max_tokens is None else max_tokens
        if longest > config.max_context:
            raise ConfigError(f"{longest} tokens are needed, but the model's context is {config.max_context}")
        options = BackendOptions(
            device=torch.device("cpu"),
            dtype=precision.dtype,
            quantization=resolve_quantization(precision.quantization, config),
            kv_dtype=precision.kv_dtype,
            num_threads=num_threads,
        )
        self._model = load_model(folder, backend=select_backend(options))
        layout = kv_layout(
            config,
            fingerprint=self._model.fingerprint,
            dtype=options.dtype,
            block_size=_BLOCK_SIZE,
            kv_dtype=options.kv_dtype,
        )
        self._table = [BlockId(i) for i in range(-(-longest // _BLOCK_SIZE))]
        self._runner = ModelRunner(self._model, PagedKVCache(layout, num_blocks=len(self._table)))
        self.vocab_size = config.vocab_size
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.weight_format = config.weight_format
        """How the checkpoint stores its quantized weights; None for float weights."""

    @torch.inference_mode()
    def __call__(self, ids: list[int]) -> Tensor:
        """Return float32 logits after each token, `[num_tokens, vocab_size]`."""
        request = self._request(ids)
        # Copied, as the next chunk reuses the buffer.
        return torch.cat([self._model.logits(hidden).clone() for hidden in self._chunks(request)])

    @torch.inference_mode()
    def greedy(
        self,
        ids: list[int],
        *,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        is_over: Callable[[list[int]], bool] = lambda _: False,
    ) -> list[int]:
        """Return the likeliest continuation, of at most `max_tokens`; ends before the model's end of sequence, or one
        of `stop_ids`, and after a token with which it `is_over`.
        """
        request = self._request(ids)
        for hidden in self._chunks(request):
            last = hidden[-1:].clone()
        answer: list[int] = []
        while True:
            token = int(self._model.logits(last).argmax())
            if token in self.eos_token_ids or token in stop_ids:
                return answer
            answer.append(token)
            if len(answer) == max_tokens or is_over(answer):
                return answer
            request.token_ids.append(token)
            last = self._hidden(request, len(request.token_ids) - 1, 1)

    def _request(self, ids: list[int]) -> Request:
        return Request(
            request_id=RequestId("quality"),
            token_ids=array("i", ids),
            num_prompt_tokens=len(ids),
            params=SamplingParams(temperature=0.0),
            hash_root=BlockHash(b""),
            block_table=BlockTable(self._table),
        )

    def _chunks(self, request: Request) -> Iterator[Tensor]:
        """Compute the prompt chunk by chunk; each result is valid until the next."""
        count = request.num_prompt_tokens
        for start in range(0, count, CHUNK):
            yield self._hidden(request, start, min(CHUNK, count - start))

    def _hidden(self, request: Request, start: int, num_tokens: int) -> Tensor:
        """Compute tokens from `start` on. Returns their last hidden states, `[num_tokens, hidden_size]`."""
        item = BatchItem(request=request, start=start, num_tokens=num_tokens, samples=False)
        return self._runner.hidden_states(build_step_inputs(Batch(items=(item,)), _BLOCK_SIZE))
