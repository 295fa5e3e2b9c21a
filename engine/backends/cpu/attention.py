"""The compiled attention kernels behind the engine's attention Protocols."""

import ctypes

from torch import Tensor

from engine.backends.buffers import Buffers
from engine.backends.cpu.heads import CpuHeads
from engine.kernels.cpu.attention import PagedAttention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import KernelLibrary
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import StepInputs


class CpuAttention:
    """Attention by the compiled kernels over a pool of plain values."""

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
        """Raises ConfigError for a geometry that the kernels do not serve."""
        self.heads = CpuHeads(spec, kernels, buffers, block_size=cache.block_size)
        self.paged = PagedAttention(
            library, self.heads.shape, num_threads=kernels.num_threads, deterministic=deterministic
        )
        self.layers = tuple(cache.layer(i) for i in range(spec.config.num_layers))

    def plan(self, inputs: StepInputs) -> "CpuAttentionPlan":
        return CpuAttentionPlan(self, inputs)


class CpuAttentionPlan:
    """One step's attention in the compiled kernels."""

    __slots__ = ("_backend", "_metadata", "_rotations")

    def __init__(self, backend: CpuAttention, inputs: StepInputs) -> None:
        self._backend = backend
        self._rotations = backend.heads.rotations(inputs)
        self._metadata = backend.paged.plan(inputs)

    @property
    def kernels(self) -> tuple[bool, bool]:
        """True for each kernel that `attend` calls: the one for single rows, the one for chunks."""
        return self._metadata.num_singles > 0, self._metadata.num_units > 0

    @property
    def records(self) -> tuple[ctypes.Structure, ...]:
        """The kernel arguments of this step that do not depend on the layer; valid while this plan lives."""
        return *(rotation.call for rotation in self._rotations), self._metadata.step

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        heads, cache = self._backend.heads, self._backend.layers[layer]
        given, out = heads.split_heads(qkv), heads.results(qkv.shape[0])
        rotation = self._rotations[heads.rope_of_layer[layer]]
        heads.kernels.qk_norm_rope_write(rotation, given, cache, *heads.norm(layer))
        queries = given[:, : heads.shape.num_heads]
        self._backend.paged.attend(cache, queries, self._metadata, heads.windows[layer], out)
        return out
