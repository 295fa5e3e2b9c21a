"""The Llama-family decoder: embeddings, pre-normalised attention and gated MLP blocks, final norm, output head.

Plain objects holding tensors, not `nn.Module`: inference needs no parameter registry, and per-step overhead counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.layers.attention import AttentionPlan
from engine.layers.linear import Linear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rope import RotaryEmbedding, rotate_
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One block's weights; projections that read the same input are one matrix."""

    attention_norm: RMSNorm
    qkv: Linear  # rows: queries, keys, values
    head_norm: HeadNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear  # rows: gate, up
    down: Linear

    def parameters(self) -> list[Tensor]:
        """Every tensor of the block."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        norms = [self.attention_norm.weight, self.mlp_norm.weight]
        heads = [] if self.head_norm is None else [self.head_norm.weight]
        return [linear.weight for linear in linears] + biases + norms + heads


class Decoder:
    """A loaded model: token rows in, hidden states and logits out. Knows nothing of requests."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embeddings: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.embeddings = embeddings  # [vocab_size, hidden_size]
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.rope = RotaryEmbedding(config.rope, config.head_dim, embeddings.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights and hidden states are computed in."""
        return self.embeddings.dtype

    @property
    def weights_bytes(self) -> int:
        """Memory held by the parameters; tied ones count once."""
        tensors = [self.embeddings, self.norm.weight, self.head.weight]
        tensors += [tensor for layer in self.layers for tensor in layer.parameters()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states before the final norm, `[num_rows, hidden_size]`, of int64 `[num_rows]` inputs."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        cos, sin = self.rope.angles(positions, self.dtype)
        residual = F.embedding(token_ids, self.embeddings)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.attention_norm(residual)).view(residual.shape[0], -1, config.head_dim)
            rotated = qkv[:, :num_rotated]
            if layer.head_norm is not None:
                layer.head_norm.apply_(rotated)
            rotate_(rotated, cos, sin)
            residual += layer.output(plan.attend(index, qkv))
            gate, up = layer.gate_up(layer.mlp_norm(residual)).chunk(2, dim=-1)
            residual += layer.down(F.silu(gate).mul_(up))
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` from `forward` to float32 `[num_rows, vocab_size]`."""
        return self.head(self.norm(hidden)).float()
