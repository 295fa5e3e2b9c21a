"""What the decoder asks of an attention backend: one plan per step, then one call per layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.config import ModelArchitecture
from engine.model.layers.norm import HeadNorm
from engine.model.layers.rope import RotaryEmbedding
from engine.types.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """What attention is, apart from the cache: geometry, rotation, norms of queries and keys."""

    config: ModelArchitecture
    """Head counts are those of this rank."""
    rope: RotaryEmbedding
    head_norms: tuple[HeadNorm, ...] | None
    """One per layer, or none at all."""
    dtype: torch.dtype
    """Of queries and results; of the cache too unless that is quantised."""
    kv_scales: Tensor | None = None
    """The model's own, for a cache in fp8_e4m3: float32 `[num_layers, 2, num_kv_heads]`, keys' first."""


class AttentionPlan(Protocol):
    """A step's metadata, on the device, shared by all layers."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, attend over everything cached.

        `qkv`: `[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]` as projected, queries first; rows in the order
        of StepInputs; the backend may change it. Returns `[num_rows, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """Paged, causal, grouped-query attention with optional sliding windows."""

    def plan(self, inputs: StepInputs) -> AttentionPlan: ...
