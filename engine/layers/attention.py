"""What the decoder asks of an attention backend: one plan per step, then one call per layer."""

from typing import Protocol

from torch import Tensor

from engine.step_inputs import StepInputs


class AttentionPlan(Protocol):
    """A step's metadata, on the device, shared by all layers."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the step's keys and values in the paged cache, then attend over everything cached.

        `qkv`: `[num_rows, num_heads + 2 * num_kv_heads, head_dim]`, rotated, queries first; rows in the order of
        StepInputs; the backend may change it. Returns `[num_rows, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """Paged, causal, grouped-query attention with optional sliding windows."""

    def plan(self, inputs: StepInputs) -> AttentionPlan:
        """Prepare one step."""
        ...
