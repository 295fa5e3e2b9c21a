"""The interface between the decoder and an attention backend: one plan per step, then one call per layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.layers.norm import HeadNorm
from engine.model.layers.rope import RotaryEmbedding
from engine.model.spec import ModelSpec
from engine.types.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """Properties of a model's attention, apart from the cache: geometry, rotation, norms of queries and keys."""

    config: ModelSpec
    """Architecture with this rank's head counts."""
    ropes: tuple[RotaryEmbedding, ...]
    """The layers' distinct rotations."""
    rope_of_layer: tuple[int, ...]
    """For each layer, the number of its rotation among them."""
    head_norms: tuple[HeadNorm, ...] | None
    """One per layer; None where heads are not normed."""
    dtype: torch.dtype
    """Dtype of queries and results, and of the cache unless that is quantised."""
    kv_scales: Tensor | None = None
    """Scales of the model for a cache in fp8_e4m3, keys' first: float32 `[num_layers, 2, num_kv_heads]`; None: 1."""


class AttentionPlan(Protocol):
    """A step's metadata, on the device, shared by all layers."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, attend to everything cached.

        `qkv`: `[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]` as projected, queries first; rows in the order
        of StepInputs; the backend may change it. Returns `[num_rows, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """Paged, causal, grouped-query attention with optional sliding windows."""

    def plan(self, inputs: StepInputs) -> AttentionPlan: ...
