"""Executes one step: lays out the batch, runs the decoder over the paged cache, samples where asked."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kv_cache import PagedKVCache
from engine.layers.attention import AttentionBackend
from engine.models.decoder import Decoder
from engine.request import Batch, SampledToken
from engine.sampler import Sampler
from engine.step_inputs import StepInputs, build_step_inputs
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
        self._attention = attention or model.backend.attention(model.attention_spec, kv_cache)
        self._sampler = Sampler(
            eos_token_ids=model.config.eos_token_ids, device=model.device, kernels=model.backend.sampling()
        )

    def execute(self, batch: Batch) -> list[SampledToken]:
        """Compute a batch's tokens into the cache; one new token per item with `samples`, in order."""
        if not batch.items:
            return []
        with torch.inference_mode():
            inputs = build_step_inputs(batch, self.kv_cache.block_size)
            if self._announce is not None:
                self._announce(inputs)
            logits = self.compute(inputs)
            if logits is None:
                return []
            return self._sampler.sample(logits, [item.request for item in batch.items if item.samples])

    @torch.inference_mode()
    def compute(self, inputs: StepInputs) -> Tensor | None:
        """Fill the cache; float32 logits of the rows that sample, `[num_samples, vocab_size]`, None without any.

        Of a model on several ranks, rank 0 has the logits.
        """
        hidden = self.hidden_states(inputs)
        if not len(inputs.sample_rows):
            return None
        if len(inputs.sample_rows) < hidden.shape[0] or len(inputs.starts) > 1:
            hidden = hidden.index_select(0, torch.from_numpy(inputs.sample_rows).to(hidden.device))
        return self.model.logits(hidden)

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """Last hidden states, `[num_rows, hidden_size]`, in the rows' order; fills the cache on the way."""
        device = self.model.device
        token_ids = torch.from_numpy(inputs.token_ids).to(device, non_blocking=True)
        return self.model.forward(token_ids, self._attention.plan(inputs))
