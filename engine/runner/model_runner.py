"""Executes steps: lays out a batch, runs the decoder over the paged cache, samples tokens.

`launch` queues all of it on the device without waiting. Sampled tokens stay on the device as well, so that the next
step can compute tokens whose ids the host does not know yet.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.backend import StepGraphs
from engine.model.decoder import Decoder
from engine.model.layers.attention import AttentionBackend
from engine.runner.block_mover import BlockMover
from engine.runner.device_queue import Staging, device_queue
from engine.runner.pending_samples import ComingKeys, PendingSamples
from engine.runner.prompt_logprobs import PendingScores, RowScores, score_rows
from engine.runner.step_input_builder import StepInputBuilder
from engine.sampling.sampler import Sampler, sample_rows
from engine.types.request import Batch, SampledToken
from engine.types.runner import LaunchedStep
from engine.types.step_inputs import IntArray, StepInputs
from tandem.errors import ConfigError, InvariantError


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
        num_host_slots: int = 0,
        on_computed: Callable[[Batch], None] | None = None,
    ) -> None:
        """`num_threads`: for torch's CPU operators, process-wide; None leaves them as they are.

        `announce`: called with every step before it is computed here, so that the model's other ranks compute it too.
        `num_host_slots`: places in host memory for blocks that batches offload. `on_computed`: called with every
        batch once the cache has its keys and values; with it, layers are not reported.
        """
        if not kv_cache.serves(model.dtype) or kv_cache.tensor.device != model.device:
            raise ConfigError(
                f"KV cache is {kv_cache.tensor.dtype} on {kv_cache.tensor.device}, "
                f"the model {model.dtype} on {model.device}"
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = model
        self.kv_cache = kv_cache
        self.blocks = BlockMover(kv_cache, num_host_slots=num_host_slots)
        self._announce = announce
        self._on_computed = on_computed
        self._is_on_host = model.device.type == "cpu"
        self.graphs: StepGraphs | None = None
        self._queue = device_queue(model.device)
        self._staging = Staging(self._queue)
        self._sampled: Tensor | None = None  # int64 [num_samples], of the last step
        self._inputs = StepInputBuilder(
            kv_cache.block_size, len(kv_cache.layout.groups) - 1, takes_adapters=model.adapters is not None
        )
        self._attention = attention or model.backend.attention(model.attention_spec, kv_cache)
        self._sampler = Sampler(
            eos_token_ids=model.config.eos_token_ids,
            device=model.device,
            kernels=model.backend.sampling(model.config.vocab_size),
            put=self._staging.upload,
        )

    def launch(self, batch: Batch, on_layers: Callable[[int], None] | None = None) -> LaunchedStep:
        with torch.inference_mode(), self._staging.step():
            inputs = self._inputs.build(batch)
            if self._announce is not None:
                self._announce(inputs)
            reports_layers = self._is_on_host and self._on_computed is None
            logits, scores = self._compute(inputs, on_layers if reports_layers else None)
            if self._on_computed is not None:
                self._on_computed(batch)
            step = self._sample(logits, batch)
            return step if scores is None else PendingScores(step, scores, batch, self._queue)

    def _sample(self, logits: Tensor | None, batch: Batch) -> LaunchedStep:
        if logits is None:
            self._sampled = None
            return ComingKeys(self._queue)
        rows = sample_rows(batch)
        chosen = self._sampler.choose(logits, rows)
        self._sampled = chosen.token_ids
        return PendingSamples(self._queue, chosen)

    def execute(self, batch: Batch) -> Sequence[SampledToken]:
        """Launch a batch and wait for it; for callers without a scheduler.

        Raises InvariantError where no token could be chosen.
        """
        if not batch.items:
            return []
        tokens = [token for token in self.launch(batch).tokens() if token is not None]
        if len(tokens) != batch.num_samples:
            raise InvariantError("the model gave no usable logits")
        return tokens

    def record_graphs(self, *, max_rows: int, max_tokens: int, max_length: int) -> None:
        """Let the backend record steps ahead, if it can. Call it before the first step, with the pool in
        place.
        """
        with torch.inference_mode():
            self.graphs = self.model.backend.graphs(
                self.model, self._attention, max_rows=max_rows, max_tokens=max_tokens, max_length=max_length
            )

    def bind_thread(self) -> None:
        self.model.backend.bind_thread()

    @torch.inference_mode()
    def compute(self, inputs: StepInputs) -> Tensor | None:
        """Fill the cache. Returns float32 logits of the rows that sample, `[num_samples, vocab_size]`; None without
        any.

        With several ranks, only rank 0 gets logits.
        """
        with self._staging.step():
            return self._compute(inputs)[0]

    def hidden_states(self, inputs: StepInputs, wanted: IntArray | None = None) -> Tensor:
        """Last hidden states of the `wanted` rows, or of all in order, `[num_rows, hidden_size]`. Fills the cache
        as well.
        """
        self._begin_adapters(inputs, wanted)
        with self._staging.step():
            rows = None if wanted is None else self._staging.upload(wanted)
            return self.model.forward(self._token_ids(inputs), self._attention.plan(inputs), rows)

    def _compute(
        self, inputs: StepInputs, on_layers: Callable[[int], None] | None = None
    ) -> tuple[Tensor | None, RowScores | None]:
        """Logits of the rows that sample, and the scores of the rows whose prompt is scored."""
        self.blocks.move(inputs)
        if len(inputs.scores) or len(inputs.pooled):
            return self._compute_and_score(inputs, on_layers)
        wanted = inputs.sample_rows
        samples_all = len(wanted) == len(inputs.token_ids) and bool((wanted[1:] > wanted[:-1]).all())
        self._begin_adapters(inputs, None if samples_all else wanted)
        rows = None if samples_all else self._staging.upload(wanted)
        token_ids = self._token_ids(inputs)
        if self.graphs is not None and len(wanted):
            logits = self.graphs.logits(inputs, token_ids, rows)
            if logits is not None:
                return logits, None
        hidden = self.model.forward(token_ids, self._attention.plan(inputs), rows, on_layers)
        return (self.model.logits(hidden) if len(wanted) else None), None

    def _compute_and_score(
        self, inputs: StepInputs, on_layers: Callable[[int], None] | None
    ) -> tuple[Tensor | None, RowScores]:
        num_samples = len(inputs.sample_rows)
        wanted = np.concatenate((inputs.sample_rows, inputs.scores[:, 0], inputs.pooled[:, 0]))
        self._begin_adapters(inputs, wanted)
        plan = self._attention.plan(inputs)
        hidden = self.model.forward(self._token_ids(inputs), plan, self._staging.upload(wanted), on_layers)
        scores = score_rows(self.model, hidden[num_samples:], inputs, self._staging)
        # Last: logits hold until the next ones are made.
        return (self.model.logits(hidden[:num_samples]) if num_samples else None), scores

    def _begin_adapters(self, inputs: StepInputs, wanted: IntArray | None) -> None:
        if self.model.adapters is not None:
            self.model.adapters.begin(inputs.adapter_slots, wanted)

    def _token_ids(self, inputs: StepInputs) -> Tensor:
        """Token ids of every row, int64 `[num_rows]`; ids not known to the host come from the previous step's
        samples.
        """
        token_ids = self._staging.upload(inputs.token_ids)
        if len(inputs.feeds):
            if self._sampled is None:
                raise InvariantError("a step computes tokens that no step has sampled")
            rows, samples = self._staging.upload(inputs.feeds.T.copy()).unbind(0)
            # A negative id marks a failed request: its row is computed in vain.
            token_ids[rows] = self._sampled[samples].clamp_(min=0)
        return token_ids
