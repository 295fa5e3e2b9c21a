"""Executes one step: lays out the batch, runs the decoder over the paged cache, samples where asked."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.backend import StepGraphs
from engine.kv_cache import PagedKVCache
from engine.layers.attention import AttentionBackend
from engine.models.decoder import Decoder
from engine.request import Batch, SampledToken
from engine.sampler import Sampler
from engine.step_inputs import IntArray, StepInputBuilder, StepInputs
from tandem.errors import ConfigError


class ModelRunner:
    """A model with its KV cache. Used by one thread, the engine's."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: PagedKVCache,
        *,
        attention: AttentionBackend | None = None,
        num_threads: int | None = None,
        announce: Callable[[StepInputs], None] | None = None,
    ) -> None:
        """`num_threads`: for torch's CPU operators, process-wide; None leaves them as they are.

        `announce`: told of every step before it is computed here, so that the model's other ranks compute it too.
        """
        if kv_cache.tensor.dtype != model.dtype or kv_cache.tensor.device != model.device:
            raise ConfigError(
                f"KV cache is {kv_cache.tensor.dtype} on {kv_cache.tensor.device}, "
                f"the model {model.dtype} on {model.device}"
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = model
        self.kv_cache = kv_cache
        self._announce = announce
        self._graphs: StepGraphs | None = None
        self._inputs = StepInputBuilder(kv_cache.block_size)
        self._attention = attention or model.backend.attention(model.attention_spec, kv_cache)
        self._sampler = Sampler(
            eos_token_ids=model.config.eos_token_ids, device=model.device, kernels=model.backend.sampling()
        )

    def execute(self, batch: Batch) -> list[SampledToken]:
        """Compute a batch's tokens into the cache; one new token per item with `samples`, in order."""
        if not batch.items:
            return []
        with torch.inference_mode():
            inputs = self._inputs.build(batch)
            if self._announce is not None:
                self._announce(inputs)
            logits = self.compute(inputs)
            if logits is None:
                return []
            return self._sampler.sample(logits, [item.request for item in batch.items if item.samples])

    def record_graphs(self, *, max_rows: int, max_length: int) -> None:
        """Let the backend record decoding steps ahead, if it can; before the first step, with the pool in place."""
        with torch.inference_mode():
            self._graphs = self.model.backend.graphs(
                self.model, self._attention, max_rows=max_rows, max_length=max_length
            )

    def bind_thread(self) -> None:
        """See Runner."""
        self.model.backend.bind_thread()

    @torch.inference_mode()
    def compute(self, inputs: StepInputs) -> Tensor | None:
        """Fill the cache; float32 logits of the rows that sample, `[num_samples, vocab_size]`, None without any.

        Of a model on several ranks, rank 0 has the logits.
        """
        if len(inputs.copies):
            sources, targets = torch.from_numpy(inputs.copies).to(self.kv_cache.tensor.device).unbind(1)
            self.kv_cache.copy_blocks(sources, targets)
        if self._graphs is not None:
            logits = self._graphs.logits(inputs)
            if logits is not None:
                return logits
        rows = inputs.sample_rows
        everyone = len(rows) == len(inputs.token_ids) and bool((rows[1:] > rows[:-1]).all())
        hidden = self.hidden_states(inputs, None if everyone else rows)
        return self.model.logits(hidden) if len(rows) else None

    def hidden_states(self, inputs: StepInputs, wanted: IntArray | None = None) -> Tensor:
        """Last hidden states of the wanted rows, or of all in their order; fills the cache on the way."""
        token_ids = self._to_device(inputs.token_ids)
        rows = None if wanted is None else self._to_device(wanted)
        return self.model.forward(token_ids, self._attention.plan(inputs), rows)

    def _to_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)
