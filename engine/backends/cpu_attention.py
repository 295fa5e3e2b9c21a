"""The compiled attention kernels behind the engine's attention Protocols."""

import ctypes

import torch
from torch import Tensor

from engine.backends.buffers import Buffers
from engine.kernels.cpu.attention import AttentionShape, PagedAttention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import KernelLibrary
from engine.kv_cache import PagedKVCache
from engine.layers.attention import AttentionSpec
from engine.step_inputs import StepInputs


class CpuAttention:
    """See AttentionBackend."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: PagedKVCache,
        library: KernelLibrary,
        kernels: CpuElementwise,
        buffers: Buffers,
        *,
        num_threads: int,
        deterministic: bool,
    ) -> None:
        """ConfigError for a geometry that the kernels do not serve."""
        config = spec.config
        self.shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=cache.block_size,
            dtype=cache.tensor.dtype,
        )
        self.spec = spec
        self.kernels = kernels
        self.buffers = buffers
        self.paged = PagedAttention(library, self.shape, num_threads=num_threads, deterministic=deterministic)
        self.layers = tuple(cache.layer(i) for i in range(config.num_layers))
        self.norm_weights = head_norm_weights(spec)
        self.eps = spec.head_norms[0].eps if spec.head_norms else 0.0

    def plan(self, inputs: StepInputs) -> "CpuAttentionPlan":
        """See AttentionBackend."""
        return CpuAttentionPlan(self, inputs)


def head_norm_weights(spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Per layer one row per head, as the kernel reads them: queries' weight for queries, keys' for keys."""
    config = spec.config
    return tuple(
        torch.cat((norm.query.expand(config.num_heads, -1), norm.key.expand(config.num_kv_heads, -1)))
        for norm in spec.head_norms or ()
    )


class CpuAttentionPlan:
    """See AttentionPlan."""

    __slots__ = ("_backend", "_metadata", "_rotation")

    def __init__(self, backend: CpuAttention, inputs: StepInputs) -> None:
        self._backend = backend
        cos, sin = backend.spec.rope.half_angles(torch.from_numpy(inputs.positions))
        self._rotation = backend.kernels.plan_rotation(backend.shape, cos, sin, inputs.slots)
        self._metadata = backend.paged.plan(inputs)

    @property
    def kernels(self) -> tuple[bool, bool]:
        """Whether `attend` calls the kernel for single rows, and the one for chunks."""
        return self._metadata.num_singles > 0, self._metadata.num_units > 0

    @property
    def records(self) -> tuple[ctypes.Structure, ...]:
        """All that the kernels are told of this step beside what each layer passes: valid while this plan lives."""
        return self._rotation.call, self._metadata.step

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See AttentionPlan."""
        backend = self._backend
        shape, rows = backend.shape, qkv.shape[0]
        heads = qkv.view(rows, -1, shape.head_dim)
        weight = backend.norm_weights[layer] if backend.norm_weights else None
        cache = backend.layers[layer]
        backend.kernels.qk_norm_rope_write(self._rotation, heads, cache, weight, backend.eps)
        out = backend.buffers.rows("attended", rows, shape.num_heads * shape.head_dim, shape.dtype)
        window = backend.spec.config.layer_windows[layer]
        backend.paged.attend(cache, heads[:, : shape.num_heads], self._metadata, window, out)
        return out
