"""Attention heads on a CPU, whatever dtype the cache has: angles, head norms, buffers of results."""

import torch
from torch import Tensor

from engine.backends.buffers import Buffers
from engine.kernels.cpu.attention import CpuAttentionShape
from engine.kernels.cpu.elementwise import CpuElementwise, RotationPlan
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import StepInputs


class CpuHeads:
    """Attention heads of one model in the form that compiled kernels take: norms, rotary embedding, windows by
    layer.
    """

    __slots__ = ("_buffers", "_eps", "_norm_weights", "_ropes", "kernels", "rope_of_layer", "shape", "windows")

    def __init__(self, spec: AttentionSpec, kernels: CpuElementwise, buffers: Buffers, *, block_size: int) -> None:
        config, norms = spec.config, spec.head_norms or ()
        self.shape = CpuAttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=spec.dtype,
            scale=config.layers[0].score_scale,
            soft_cap=config.layers[0].soft_cap,
        )
        self.kernels = kernels
        self.windows = config.layer_windows
        self.rope_of_layer = spec.rope_of_layer
        self._ropes = spec.ropes
        self._buffers = buffers
        # One row per head, as the kernel reads them: queries' weight for queries, keys' for keys.
        self._norm_weights = [
            torch.cat((norm.query.expand(config.num_heads, -1), norm.key.expand(config.num_kv_heads, -1)))
            for norm in norms
        ]
        self._eps = norms[0].eps if norms else 0.0

    def rotations(self, inputs: StepInputs) -> tuple[RotationPlan, ...]:
        """Angles and cache slots of one step, for each rotation among the layers."""
        positions = torch.from_numpy(inputs.positions)
        angles = (rope.half_angles(positions) for rope in self._ropes)
        return tuple(self.kernels.plan_rotation(self.shape, cos, sin, inputs.slots) for cos, sin in angles)

    def split_heads(self, qkv: Tensor) -> Tensor:
        """View `qkv` as `[num_rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values."""
        return qkv.view(qkv.shape[0], -1, self.shape.head_dim)

    def norm(self, layer: int) -> tuple[Tensor | None, float]:
        """A layer's head norm: weights, one row per head, and epsilon; no weights where heads are not normed."""
        return self._norm_weights[layer] if self._norm_weights else None, self._eps

    def results(self, num_rows: int) -> Tensor:
        """Buffer for a layer's results, `[num_rows, num_heads * head_dim]`; valid until the next layer's."""
        return self._buffers.rows("attended", num_rows, self.shape.num_heads * self.shape.head_dim, self.shape.dtype)
