"""The decoder: embeddings, layers of attention and MLP with norms around them, final norm, output head.

Plain objects, not `nn.Module`: inference needs no parameter registry, and per-step overhead matters. The backend
decides how each part is computed; a layer's output is added to the residual by the norm that follows it, so that a
backend can do both in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapters.kernels import AdapterKernels
from engine.model.backend import Backend, Closing, Embedding, Norm, Projection
from engine.model.layers.attention import AttentionPlan, AttentionSpec
from engine.model.layers.norm import HeadNorm
from engine.model.layers.rope import RotaryEmbedding
from engine.model.parallel_group import ParallelGroup
from engine.model.spec import ModelSpec, NormKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One block's weights; projections that read the same input are one matrix."""

    attention_norm: Norm
    qkv: Projection  # rows: queries, keys, values
    head_norm: HeadNorm | None
    kv_scales: Tensor | None  # float32 [2, num_kv_heads], for a cache in fp8_e4m3
    output: Closing
    mlp_norm: Norm | None  # None: the MLP reads what attention reads
    gate_up: Projection | None  # activation(gate) * up; None: `down` is a mixture of experts, which reads the norm
    down: Closing

    @property
    def nbytes(self) -> int:
        """Memory of the block's weights."""
        parts = (self.attention_norm, self.qkv, self.output, self.down)
        optional = (self.mlp_norm, self.head_norm, self.gate_up)
        return sum(part.nbytes for part in parts) + sum(part.nbytes for part in optional if part is not None)

    def mlp(self, normed: Tensor, residual: Tensor) -> Tensor | None:
        """The MLP, or mixture of experts, of normed rows; see Closing."""
        return self.down(normed if self.gate_up is None else self.gate_up(normed), residual)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """Every weight of a model, in its backend's form."""

    embedding: Embedding
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Projection


class Decoder:
    """A loaded model: token ids in, hidden states and logits out. Knows nothing of requests."""

    def __init__(
        self,
        config: ModelSpec,
        weights: DecoderWeights,
        *,
        backend: Backend,
        fingerprint: str,
        group: ParallelGroup,
        num_kept: int = 0,
        adapters: AdapterKernels | None = None,
    ) -> None:
        """`group`: the ranks that share the model; each has a decoder with its part of the weights. `num_kept`:
        matrices that are multiplied as a quantized checkpoint stores them. `adapters`: add to its projections, if any.
        """
        self.config = config
        self.backend = backend
        self.fingerprint = fingerprint
        self.num_kept = num_kept
        self.adapters = adapters
        self._group = group
        self.embedding = weights.embedding
        self.layers = tuple(weights.layers)
        self.norm = weights.norm
        self.head = weights.head
        self.ropes = tuple(RotaryEmbedding(rope, config.head_dim, backend.device) for rope in config.ropes)

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states and, unless quantized, of weights."""
        return self.backend.dtype

    @property
    def weights_bytes(self) -> int:
        """Memory held by the parameters; tied ones count once."""
        ends = self.embedding.nbytes + self.norm.nbytes + self.head.nbytes
        return ends + sum(layer.nbytes for layer in self.layers)

    @property
    def attention_spec(self) -> AttentionSpec:
        """The properties of this model that its attention depends on."""
        norms = tuple(layer.head_norm for layer in self.layers if layer.head_norm is not None)
        return AttentionSpec(
            config=self.config,
            ropes=self.ropes,
            rope_of_layer=tuple(self.config.ropes.index(layer.rope) for layer in self.config.layers),
            head_norms=norms or None,
            dtype=self.dtype,
            kv_scales=self._kv_scales(),
        )

    def forward(
        self,
        token_ids: Tensor,
        plan: AttentionPlan,
        wanted: Tensor | None = None,
        on_layers: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states before the final norm, `[num_rows, hidden_size]`, of int64 `[num_rows]` token ids.

        `wanted`: the rows whose hidden states are returned, int64 `[num_wanted]`; None: all. The others still
        write their keys and values in every layer, all that a prompt's inner tokens are computed for, and
        are dropped after the last attention. `on_layers` receives the number of layers whose keys and values have
        been launched on the device, once all ranks have launched them.
        """
        residual, delta = self._blocks(self.embedding(token_ids), plan, wanted, on_layers)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, float32 `[num_rows, vocab_size]`, of hidden states `[num_rows, hidden_size]` from `forward`."""
        return self.head(self.norm(hidden))

    @property
    def is_first_rank(self) -> bool:
        """Whether this process gets the logits."""
        return self._group.rank == 0

    def final_states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to `[num_rows, hidden_size]` from `forward`. Returns float32 states.

        Not by the backend's norm, whose results may have a layout that only the head understands.
        """
        spec, size = self.config.norm, hidden.shape[1:]
        weight, bias = self.norm.weight.float(), self.norm.bias
        if spec.kind is NormKind.RMS:
            states = F.rms_norm(hidden.float(), size, weight, spec.eps)
        else:
            states = F.layer_norm(hidden.float(), size, weight, None if bias is None else bias.float(), spec.eps)
        # The norm's weight includes the factor on logits.
        return states if self.config.logit_scale == 1.0 else states.div_(self.config.logit_scale)

    def logits_of_embedded(self, embedded: Tensor, plan: AttentionPlan) -> Tensor:
        """Logits of all rows from their embeddings, `[num_rows, hidden_size]`, which are overwritten."""
        residual, delta = self._blocks(embedded, plan, None)
        return self.head(self.norm(residual, delta))

    def _blocks(
        self,
        residual: Tensor,
        plan: AttentionPlan,
        wanted: Tensor | None,
        on_layers: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers. Returns the residual stream, and the last layer's output if it is still to be added."""
        delta: Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(residual, delta)
            attended = plan.attend(index, layer.qkv(normed))
            if index == last and wanted is not None:
                if not len(wanted):
                    # No sum follows: without this, rank 0 could end the step before others have written their KV.
                    self._group.barrier()
                    return residual[:0], None
                residual, attended = residual.index_select(0, wanted), attended.index_select(0, wanted)
                if layer.mlp_norm is None:
                    normed = layer.attention_norm(residual)  # whose rows only projections may select
                if self.adapters is not None:
                    self.adapters.narrow()
            delta = layer.output(attended, residual)
            # After the sum over the ranks: each has computed this layer's keys and values.
            if on_layers is not None and index < last:
                on_layers(index + 1)
            if layer.mlp_norm is not None:
                delta = layer.mlp(layer.mlp_norm(residual, delta), residual)
            else:
                delta = _sum(delta, layer.mlp(normed, residual))
        return residual, delta

    def _kv_scales(self) -> Tensor | None:
        given = [layer.kv_scales for layer in self.layers]
        if all(scales is None for scales in given):
            return None
        ones = torch.ones(2, self.config.num_kv_heads, device=self.device)
        return torch.stack([ones if scales is None else scales for scales in given])


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Sum of what two parallel projections leave to be added; None where they have added it themselves."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)
