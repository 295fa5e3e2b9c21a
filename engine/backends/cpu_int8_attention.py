"""The compiled kernels over an int8 cache, behind the engine's attention Protocols."""

import torch
from torch import Tensor

from engine.backends.buffers import Buffers
from engine.backends.cpu_attention import head_norm_weights
from engine.kernels.cpu.attention import AttentionShape
from engine.kernels.cpu.attention_int8 import CodedLayer, PagedInt8Attention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import KernelLibrary
from engine.kv_cache import PagedKVCache
from engine.layers.attention import AttentionSpec
from engine.step_inputs import StepInputs
from tandem.errors import ConfigError


class CpuInt8Attention:
    """See AttentionBackend."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: PagedKVCache,
        library: KernelLibrary,
        kernels: CpuElementwise,
        buffers: Buffers,
        *,
        deterministic: bool,
    ) -> None:
        """ConfigError for a geometry that the kernels do not serve, or a cache that is not in int8."""
        config = spec.config
        self.shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=cache.block_size,
            dtype=spec.dtype,
        )
        self.spec = spec
        self.kernels = kernels
        self.buffers = buffers
        self.paged = PagedInt8Attention(
            library,
            self.shape,
            windows=config.layer_windows,
            num_threads=kernels.num_threads,
            deterministic=deterministic,
        )
        self.layers = tuple(_coded(cache, i) for i in range(config.num_layers))
        self.norm_weights = head_norm_weights(spec)
        self.eps = spec.head_norms[0].eps if spec.head_norms else 0.0

    def plan(self, inputs: StepInputs) -> "CpuInt8AttentionPlan":
        """See AttentionBackend."""
        return CpuInt8AttentionPlan(self, inputs)


class CpuInt8AttentionPlan:
    """See AttentionPlan."""

    __slots__ = ("_backend", "_metadata", "_rotation")

    def __init__(self, backend: CpuInt8Attention, inputs: StepInputs) -> None:
        self._backend = backend
        cos, sin = backend.spec.rope.half_angles(torch.from_numpy(inputs.positions))
        self._rotation = backend.kernels.plan_rotation(backend.shape, cos, sin, inputs.slots)
        self._metadata = backend.paged.plan(inputs)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See AttentionPlan."""
        backend = self._backend
        shape, rows = backend.shape, qkv.shape[0]
        heads = qkv.view(rows, -1, shape.head_dim)
        weight = backend.norm_weights[layer] if backend.norm_weights else None
        cache = backend.layers[layer]
        backend.kernels.qk_norm_rope_write_int8(self._rotation, heads, cache, weight, backend.eps)
        out = backend.buffers.rows("attended", rows, shape.num_heads * shape.head_dim, shape.dtype)
        window = backend.spec.config.layer_windows[layer]
        backend.paged.attend(cache, heads[:, : shape.num_heads], self._metadata, window, out)
        return out


def _coded(cache: PagedKVCache, index: int) -> CodedLayer:
    scales = cache.layer_scales(index)
    if scales is None:
        raise ConfigError(f"int8 attention over a cache in {cache.layout.dtype}")
    return CodedLayer(cache.layer(index), scales)
