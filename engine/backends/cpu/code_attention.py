"""The compiled kernels over a cache in int8 or int4, behind the engine's attention Protocols."""

from torch import Tensor

from engine.backends.buffers import Buffers
from engine.backends.cpu.heads import CpuHeads
from engine.kernels.cpu.attention_codes import CodedLayer, PagedCodeAttention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import KernelLibrary
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import StepInputs
from tandem.errors import ConfigError


class CpuCodeAttention:
    """Attention by the compiled kernels over a pool of codes."""

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
        """Raises ConfigError for a geometry that the kernels do not serve, or a cache without scales."""
        self.layers = tuple(_coded(cache, i) for i in range(spec.config.num_layers))
        self.heads = CpuHeads(spec, kernels, buffers, block_size=cache.block_size)
        self.paged = PagedCodeAttention(
            library,
            self.heads.shape,
            cache.layout.dtype,
            windows=self.heads.windows,
            num_threads=kernels.num_threads,
            deterministic=deterministic,
        )

    def plan(self, inputs: StepInputs) -> "CpuCodeAttentionPlan":
        return CpuCodeAttentionPlan(self, inputs)


class CpuCodeAttentionPlan:
    """One step's attention over codes in the compiled kernels."""

    __slots__ = ("_backend", "_metadata", "_rotations")

    def __init__(self, backend: CpuCodeAttention, inputs: StepInputs) -> None:
        self._backend = backend
        self._rotations = backend.heads.rotations(inputs)
        self._metadata = backend.paged.plan(inputs)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        heads, cache = self._backend.heads, self._backend.layers[layer]
        given, out = heads.split_heads(qkv), heads.results(qkv.shape[0])
        rotation = self._rotations[heads.rope_of_layer[layer]]
        heads.kernels.qk_norm_rope_encode(rotation, given, cache, *heads.norm(layer))
        queries = given[:, : heads.shape.num_heads]
        self._backend.paged.attend(cache, queries, self._metadata, heads.windows[layer], out)
        return out


def _coded(cache: PagedKVCache, index: int) -> CodedLayer:
    scales = cache.layer_scales(index)
    if scales is None:
        raise ConfigError(f"attention over codes, with a cache in {cache.layout.dtype}")
    return CodedLayer(cache.layer(index), scales)
