"""Compiled kernels on a CPU: packed projections, fused elementwise passes, attention that reads blocks in place.

Every processor has kernels for everything, on AMX tiles or on vectors as wide as it has them. In the steady state a
step allocates nothing here: every result lies in a buffer with its own name.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.adapters.kernels import AdapterKernels
from engine.backends.buffers import Buffers
from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.code_attention import CpuCodeAttention
from engine.backends.cpu.family_parts import CappedHead, CompiledInputNorm, RoutedExperts, StackedGated
from engine.backends.cpu.programs import CpuPrograms
from engine.backends.options import BackendOptions
from engine.backends.thread_priority import lower_thread_priority
from engine.kernels.cpu.adapters import CpuAdapters
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.gemm import (
    FEW_ROWS,
    TILE_COLUMNS,
    Arena,
    Arithmetic,
    Epilogue,
    PackedLinear,
    Tiles,
    best_arithmetic,
    stored_arithmetic,
    whole_tiles,
)
from engine.kernels.cpu.library import KernelLibrary, load_kernels
from engine.kernels.cpu.mixture import PackedExpert, PackedMixture
from engine.kernels.cpu.norms import CompiledNorm, CpuActivations, NormMode
from engine.kernels.cpu.sampling import CpuSampling
from engine.kernels.cpu.threads import bind_team
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.backend import Closing, Embedding, Norm, Projection, ProjectionRole, RecordableModel, StepGraphs
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.grouped_attention import GroupedAttention, attention_of_groups
from engine.model.layers.norm import RowNorm
from engine.model.layers.torch_attention import TorchAttention
from engine.model.spec import Activation, MoeSpec, NormKind, NormSpec
from engine.sampling.backend import SamplingKernels

_CACHE_LINE_BYTES = 64
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
_WEIGHT_SCHEMES = tuple(scheme.value for scheme in WeightScheme)


class BufferedProjection:
    """A packed matrix whose results lie in the buffer of its role."""

    __slots__ = ("_buffers", "_linear", "_name", "_padding")

    def __init__(self, linear: PackedLinear, buffers: Buffers, name: str, *, padding: int = 0) -> None:
        self._linear = linear
        self._buffers = buffers
        self._name = name
        self._padding = padding

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights."""
        return self._linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        # Rows of whole tiles, in case the next projection is given tiles.
        out = self._buffers.rows(
            self._name, whole_tiles(rows), self._linear.columns, self._linear.out_dtype, padding=self._padding
        )[:rows]
        self._linear(x, out)
        return out


class AddedProjection:
    """A packed matrix whose product is added to the residual stream directly, without a buffer of its own."""

    __slots__ = ("_linear",)

    def __init__(self, linear: PackedLinear) -> None:
        """`linear` must have the epilogue ADD."""
        self._linear = linear

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights."""
        return self._linear.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> None:
        self._linear(x, residual)


class PackedEmbedding:
    """Looks rows up in the packed output head that shares the table."""

    __slots__ = ("_buffers", "_linear")

    nbytes = 0

    def __init__(self, linear: PackedLinear, buffers: Buffers) -> None:
        self._linear = linear
        self._buffers = buffers

    def __call__(self, token_ids: Tensor) -> Tensor:
        out = _residual(self._buffers, len(token_ids), self._linear.depth, self._linear.dtype)
        self._linear.embed(token_ids, out)
        return out


class BufferedEmbedding:
    """Looks rows up in a table of its own."""

    __slots__ = ("_buffers", "_kernels", "_weight")

    def __init__(self, weight: Tensor, kernels: CpuElementwise, buffers: Buffers) -> None:
        self._weight = weight  # [vocab_size, hidden_size]
        self._kernels = kernels
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See Embedding. Raises InvariantError for an id beyond the table."""
        out = _residual(self._buffers, len(token_ids), self._weight.shape[1], self._weight.dtype)
        self._kernels.gather_rows(self._weight, token_ids, out)
        return out


class FusedNorm:
    """Adds the delta to the residual stream and norms it, in one pass."""

    __slots__ = ("_buffers", "_eps", "_gives_tiles", "_kernels", "weight")
    bias = None

    def __init__(
        self, weight: Tensor, eps: float, kernels: CpuElementwise, buffers: Buffers, *, gives_tiles: bool
    ) -> None:
        """`gives_tiles`: with many rows, write tiles, which the following projection reads."""
        self._gives_tiles = gives_tiles
        self.weight = weight  # [size]
        self._eps = eps
        self._kernels = kernels
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        rows, size = residual.shape
        out = self._buffers.rows("normed", whole_tiles(rows), size, residual.dtype)[:rows]
        norm = self._kernels.norm_to_tiles if self._gives_tiles and rows > FEW_ROWS else self._kernels.add_rms_norm
        norm(residual, delta, self.weight, self._eps, out)
        return out


class CpuBackend:
    """Implements engine.model.backend.Backend. Results lie in buffers named after them.

    On AMX, norms and gates give many rows as tiles to the projections that read them (`engine.kernels.cpu.gemm.Tiles`):
    nothing else may read these results.
    """

    packs_matrices = True

    def __init__(self, library: KernelLibrary, options: BackendOptions) -> None:
        """Raises KernelsUnavailable when the library or the processor cannot serve `options`."""
        self.device = options.device
        self.dtype = TORCH_DTYPES[options.dtype]
        if self.dtype not in _KERNEL_DTYPES:
            raise KernelsUnavailable(f"compiled CPU kernels compute in float32 and bfloat16, not {options.dtype}")
        self._library = library
        self._threads = options.num_threads
        self._binds_threads = options.binds_threads
        self._deterministic = options.deterministic
        self._takes_adapters = options.takes_adapters
        has_tiles = best_arithmetic(library.features, self.dtype) is Arithmetic.BF16
        keeps = options.quantization == "stored" or (options.quantization == "auto" and not has_tiles)
        self.keeps_stored = keeps and self.dtype is torch.bfloat16
        # Codes of floats save memory, not time: they are no faster than restored weights, and prompts may be slower.
        self._keeps_floats = options.quantization != "auto"
        quantization = "none" if options.quantization in ("auto", "stored") else options.quantization
        self.quantizes_to = WeightScheme(quantization) if quantization in _WEIGHT_SCHEMES else None
        of_packed = "none" if self.quantizes_to is not None else quantization
        if of_packed != "none" and self.dtype is not torch.bfloat16:
            raise KernelsUnavailable(
                f"{quantization} projections work on bfloat16 activations: set model.dtype to bfloat16"
            )
        self._arithmetic = best_arithmetic(library.features, self.dtype, quantization=of_packed)
        # The head decides between tokens, and no later layer averages its error out: never fewer than eight bits.
        is_head_int8 = quantization != "none" and self.dtype is torch.bfloat16
        self._head_arithmetic = best_arithmetic(
            library.features, self.dtype, quantization="int8" if is_head_int8 else "none"
        )
        self._kernels = CpuElementwise(library, self.dtype, num_threads=options.num_threads)
        self._activations = CpuActivations(library, self.dtype, num_threads=options.num_threads)
        self._buffers = Buffers(options.device)
        self._arena = Arena(library)
        self.name = "cpu-amx" if has_tiles else "cpu-vectors"
        if quantization != "none":
            self.name += f"-{quantization}"

    def keeps(self, matrix: StoredMatrix) -> bool:
        if not self.keeps_stored and self.quantizes_to is None:
            return False
        found = stored_arithmetic(self._library.features, matrix, self.dtype)
        return found is not None and (self._keeps_floats or not found.is_of_floats)

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Projection:
        taken = self._input_tiles(weight, role)
        linear = self._pack_layer(weight, bias, Epilogue.STORE, taken)
        # Only rows of QKV: results to be added to the residual stream must be contiguous, to be sent to other ranks.
        padding = _row_padding(linear.out_dtype) if role is ProjectionRole.QKV else 0
        return BufferedProjection(linear, self._buffers, role.value, padding=padding)

    def closing(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Closing:
        taken = self._input_tiles(weight, role)
        return AddedProjection(self._pack_layer(weight, bias, Epilogue.ADD, taken))

    def adapters(self) -> AdapterKernels | None:
        if not self._takes_adapters:
            return None
        return CpuAdapters(self._library, self.dtype, num_threads=self._threads)

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> Projection:
        if activation is Activation.GELU_TANH:
            return self.gate(self.projection(weight, bias, ProjectionRole.STACKED), activation, weight.shape[0] // 2)
        given = self._tiles(weight.shape[0] // 2, Tiles.OUTPUT)
        handed = self._tiles(weight.shape[1], Tiles.INPUT) | given
        linear = self._pack_layer(weight, bias, Epilogue.GATED, handed)
        return BufferedProjection(linear, self._buffers, "gated", padding=_row_padding(linear.out_dtype))

    def gate(self, stacked: Projection, activation: Activation, size: int) -> Projection:
        if activation is not Activation.GELU_TANH:
            return StackedGated(stacked, self._kernels.silu_mul, self._buffers)
        kernels = self._activations
        to_tiles = kernels.gelu_mul_to_tiles if self._tiles(size, Tiles.OUTPUT) else None
        padding = _row_padding(self.dtype)
        return StackedGated(stacked, kernels.gelu_mul, self._buffers, gate_to_tiles=to_tiles, padding=padding)

    def mixture(self, moe: MoeSpec, router: Tensor, matrices: Iterator[Weight]) -> Projection:
        """See Backend. The choice of experts is not quantized."""
        experts = [
            PackedExpert(
                gate_up=self._pack_expert(gate_up, Epilogue.GATED),
                down=self._pack_expert(next(matrices), Epilogue.STORE_FLOAT32),
            )
            for gate_up in matrices
        ]
        arithmetic = best_arithmetic(self._library.features, self.dtype)
        packed_router = self._pack(router, None, arithmetic, Epilogue.STORE_FLOAT32, Tiles.NOTHING)
        packed = PackedMixture(self._library, moe, packed_router, experts, num_threads=self._threads)
        return RoutedExperts(packed, self._buffers)

    def head(self, weight: Tensor) -> Projection:
        return BufferedProjection(self._pack_head(weight), self._buffers, "logits")

    def embedding(self, weight: Tensor) -> BufferedEmbedding:
        return BufferedEmbedding(weight, self._kernels, self._buffers)

    def tied(self, weight: Tensor) -> tuple[Embedding, Projection]:
        linear = self._pack_head(weight)
        return PackedEmbedding(linear, self._buffers), BufferedProjection(linear, self._buffers, "logits")

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None, *, feeds_mixture: bool = False) -> Norm:
        # Experts are given rows, one by one, which do not lie together in tiles.
        gives_tiles = not feeds_mixture and bool(self._tiles(weight.shape[0], Tiles.OUTPUT))
        if spec.kind is NormKind.RMS:
            return FusedNorm(weight, spec.eps, self._kernels, self._buffers, gives_tiles=gives_tiles)
        norm = self._compiled_norm(NormMode.LAYER, weight[None], bias, spec.eps, weight.shape[0])
        return CompiledInputNorm(norm, weight, self._buffers, gives_tiles=gives_tiles)

    def no_norm(self, size: int) -> Norm:
        gives_tiles = bool(self._tiles(size, Tiles.OUTPUT))
        norm = self._compiled_norm(NormMode.NONE, None, None, 0.0, size)
        return CompiledInputNorm(norm, torch.empty(0, dtype=self.dtype), self._buffers, gives_tiles=gives_tiles)

    def row_norm(self, weight: Tensor, eps: float, kind: NormKind) -> RowNorm:
        mode = NormMode.RMS if kind is NormKind.RMS else NormMode.LAYER
        return self._compiled_norm(mode, weight.contiguous(), None, eps, weight.shape[1])

    def soft_capped(self, head: Projection, cap: float) -> Projection:
        return CappedHead(head, cap, self._activations)

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> AttentionBackend:
        if cache.layout.dtype == "fp8_e4m3":
            return attention_of_groups(spec, cache, TorchAttention)  # engine.backends.select has logged it
        make = partial(
            CpuCodeAttention if cache.layout.is_quantised else CpuAttention,
            library=self._library,
            kernels=self._kernels,
            buffers=self._buffers,
            deterministic=self._deterministic,
        )
        return attention_of_groups(spec, cache, make)

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_tokens: int, max_length: int
    ) -> StepGraphs | None:
        """See Backend. Only steps computed by our own kernels throughout can be recorded."""
        parts = attention.backends if isinstance(attention, GroupedAttention) else (attention,)
        if not all(isinstance(part, CpuAttention) for part in parts):
            return None
        return CpuPrograms(model, attention, self._library, self._buffers, max_rows=max_rows)

    def trim(self) -> None:
        self._buffers.clear()

    def bind_thread(self) -> None:
        """See Backend. Threads that wait for each other at every product must not happen to share a processor."""
        lower_thread_priority()  # first, since the team's threads inherit this thread's priority
        if self._binds_threads:
            bind_team(self._library, self._threads)

    def sampling(self, vocab_size: int) -> SamplingKernels:
        return CpuSampling(self._library, self._threads)

    def _compiled_norm(
        self, mode: NormMode, weight: Tensor | None, bias: Tensor | None, eps: float, size: int
    ) -> CompiledNorm:
        threads = self._threads
        return CompiledNorm(self._library, mode, weight, bias, eps, size=size, dtype=self.dtype, num_threads=threads)

    def _pack_head(self, weight: Tensor) -> PackedLinear:
        taken = self._tiles(weight.shape[1], Tiles.INPUT)
        return self._pack(weight, None, self._head_arithmetic, Epilogue.STORE_FLOAT32, taken)

    def _pack_layer(self, weight: Weight, bias: Tensor | None, epilogue: Epilogue, tiles: Tiles) -> PackedLinear:
        return self._pack(weight, bias, self._arithmetic_of(weight), epilogue, tiles)

    def _pack_expert(self, weight: Weight, epilogue: Epilogue) -> PackedLinear:
        arithmetic = self._arithmetic_of(weight)
        return PackedLinear(
            self._library,
            weight,
            arithmetic=arithmetic,
            epilogue=epilogue,
            num_threads=self._threads,
            arena=self._arena,
        )

    def _arithmetic_of(self, weight: Weight) -> Arithmetic:
        """What multiplies by a matrix of a layer."""
        stored = None if isinstance(weight, Tensor) else stored_arithmetic(self._library.features, weight, self.dtype)
        return stored or self._arithmetic

    def _pack(
        self, weight: Weight, bias: Tensor | None, arithmetic: Arithmetic, epilogue: Epilogue, tiles: Tiles
    ) -> PackedLinear:
        return PackedLinear(
            self._library,
            weight,
            bias,
            arithmetic=arithmetic,
            epilogue=epilogue,
            tiles=tiles,
            num_threads=self._threads,
        )

    def _input_tiles(self, weight: Weight, role: ProjectionRole) -> Tiles:
        """Tiles that a projection is given: norms and gates write them, attention does not."""
        return Tiles.NOTHING if role is ProjectionRole.OUTPUT else self._tiles(weight.shape[1], Tiles.INPUT)

    def _tiles(self, row_size: int, handed: Tiles) -> Tiles:
        """`handed` if rows of `row_size` can be in tiles: with AMX, whole tiles, all matrices in bf16, and nothing else
        that reads the rows; else none.
        """
        can = self._arithmetic is Arithmetic.BF16 and not self.keeps_stored and self.quantizes_to is None
        can = can and not self._takes_adapters
        return handed if can and row_size % TILE_COLUMNS == 0 else Tiles.NOTHING


def _residual(buffers: Buffers, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return buffers.rows("hidden", num_rows, size, dtype, padding=_row_padding(dtype))


def _row_padding(dtype: torch.dtype) -> int:
    """Padding between rows that tiles are written to: rows at a power of two would share a few sets of a cache."""
    return _CACHE_LINE_BYTES // dtype.itemsize


def cpu_backend(options: BackendOptions) -> CpuBackend:
    """Build or load the kernels. Raises KernelsUnavailable."""
    return CpuBackend(load_kernels(), options)
