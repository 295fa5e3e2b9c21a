"""Triton kernels on a GPU: fused elementwise passes, paged attention, sampling, products of few rows and of quantized
weights; other products by the vendor's library.

In deterministic mode products are computed by `engine.kernels.triton.gemm_fixed` and attention in fixed runs of keys,
so that a token's result does not depend on batch, chunks or step. Results are tensors of torch's caching
allocator: in the steady state nothing is allocated on the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.backends.cuda.attention import CudaAttention, num_multiprocessors
from engine.backends.cuda.products import DenseProducts, Product, SplitWorkspace
from engine.backends.cuda.projections import CudaClosing, CudaGated, CudaProjection
from engine.backends.cuda.quantized import QuantizedProducts
from engine.backends.options import BackendOptions
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.sampling import TritonSampling, compile_for
from engine.kernels.triton.tuning import load_table
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.backend import Projection, ProjectionRole, RecordableModel, StepGraphs
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.composed import SoftCappedHead
from engine.model.layers.linear import StackedGate, TokenEmbedding
from engine.model.layers.mixture import Expert, GroupedMixture
from engine.model.layers.norm import LayerNorm, PassThrough, TorchRowNorm
from engine.model.spec import Activation, MoeSpec, NormKind, NormSpec
from engine.sampling.backend import SamplingKernels
from tandem.errors import ConfigError

_FIRST_WITH_PDL = (9, 0)
"""Least compute capability with programmatic dependent launch: Hopper."""
_ROUNDED_BITS = {"int8": 8, "int4": 4}
_MAX_GRAPH_ROWS = 256
"""Largest batch to record: a larger step computes long enough to hide its launches."""


class CudaNorm:
    """Adds the delta to the residual stream and norms it, in one pass."""

    __slots__ = ("_eps", "_pdl", "weight")
    bias = None

    def __init__(self, weight: Tensor, eps: float, *, pdl: bool = False) -> None:
        self.weight = weight  # [size]
        self._eps = eps
        self._pdl = pdl

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        out = torch.empty_like(residual)
        add_rms_norm(residual, delta, self.weight, self._eps, out, pdl=self._pdl)
        return out


class CudaBackend:
    """Implements engine.model.backend.Backend. On CPU tensors it runs in Triton's interpreter, for tests."""

    packs_matrices = False
    quantizes_to = None

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError for a quantization that is unknown, or that `options.dtype` cannot have."""
        self.name = "triton-deterministic" if options.deterministic else "triton"
        self.device = options.device
        self.dtype = TORCH_DTYPES[options.dtype]
        self._bits = self._rounded_bits(options)
        if self._bits is not None:
            self.name += f"-{options.quantization}"
        is_gpu = options.device.type == "cuda"
        self._table = load_table(torch.cuda.get_device_name(options.device) if is_gpu else "")
        self._pdl = is_gpu and torch.cuda.get_device_capability(options.device) >= _FIRST_WITH_PDL
        """Whether kernels start while the one before ends."""
        self._deterministic = options.deterministic
        self._attention: CudaAttention | None = None
        self._block_size = 0
        # In "auto" too: fewer bytes are read for each token, and more sequences fit beside them.
        self.keeps_stored = options.quantization != "none" and self.dtype is not torch.float32
        workspace = SplitWorkspace()
        self._dense = DenseProducts(
            self._table, workspace, dtype=self.dtype, deterministic=options.deterministic, pdl=self._pdl
        )
        self._quantized = QuantizedProducts(
            self._table,
            workspace,
            device=options.device,
            num_sms=num_multiprocessors(options.device),
            deterministic=options.deterministic,
            pdl=self._pdl,
        )

    def keeps(self, matrix: StoredMatrix) -> bool:
        return self.keeps_stored and self._quantized.keeps(matrix)

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> CudaProjection:
        return CudaProjection(self._product(weight, bits=self._bits), bias, self.dtype)

    def closing(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> CudaClosing:
        return CudaClosing(self._product(weight, bits=self._bits), bias, self.dtype)

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> CudaGated:
        product = self._product(weight, bits=self._bits, is_gated=activation is Activation.SILU)
        return CudaGated(product, bias, self.dtype, activation)

    def adapters(self) -> None:
        """Return None: recorded steps have no place for adapters yet."""

    def gate(self, stacked: Projection, activation: Activation, size: int) -> StackedGate:
        return StackedGate(stacked, activation)

    def mixture(self, moe: MoeSpec, router: Tensor, matrices: Iterator[Weight]) -> GroupedMixture:
        """See Backend. One expert after the other, and the host waits for the choice: it serves, without kernels."""
        experts = [
            Expert(
                gate_up=self.gated(gate_up, None),
                down=self.projection(next(matrices), None, ProjectionRole.DOWN),
            )
            for gate_up in matrices
        ]
        return GroupedMixture(moe, CudaProjection(self._dense.product(router), None, torch.float32), experts)

    def head(self, weight: Tensor) -> CudaProjection:
        # It decides between tokens, and no later layer averages its error out: never fewer than eight bits.
        bits = None if self._bits is None else 8
        return CudaProjection(self._product(weight, bits=bits), None, torch.float32)

    def soft_capped(self, head: Projection, cap: float) -> SoftCappedHead:
        return SoftCappedHead(head, cap)

    def embedding(self, weight: Tensor) -> TokenEmbedding:
        return TokenEmbedding(weight)

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, CudaProjection]:
        # A quantized head is a matrix of its own, beside a table that few rows of are read.
        return TokenEmbedding(weight, is_shared=self._bits is None), self.head(weight)

    def norm(
        self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None, *, feeds_mixture: bool = False
    ) -> CudaNorm | LayerNorm:
        if spec.kind is not NormKind.RMS:
            return LayerNorm(weight, bias, spec.eps)
        return CudaNorm(weight, spec.eps, pdl=self._pdl)

    def no_norm(self, size: int) -> PassThrough:
        return PassThrough()

    def row_norm(self, weight: Tensor, eps: float, kind: NormKind) -> TorchRowNorm:
        return TorchRowNorm(weight, eps, kind)

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> CudaAttention:
        self._block_size = cache.block_size
        self._attention = CudaAttention(spec, cache, self._table, deterministic=self._deterministic, pdl=self._pdl)
        return self._attention

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_tokens: int, max_length: int
    ) -> StepGraphs | None:
        """See Backend. `attention` must be the last one that this backend made; else nothing is recorded. Neither is a
        model with mixtures of experts, whose launches depend on what they compute.
        """
        if self.device.type != "cuda" or self._attention is None or attention is not self._attention:
            return None
        if model.config.moe is not None:
            return None
        from engine.backends.cuda.graphs import CudaRecorder, CudaStepGraphs, graph_batch_sizes, graph_chunk_sizes

        graphs = CudaStepGraphs(
            model,
            self._attention,
            CudaRecorder(self.device),
            batch_sizes=graph_batch_sizes(min(max_rows, _MAX_GRAPH_ROWS)),
            chunk_sizes=graph_chunk_sizes(max_tokens, model.config),
            max_length=max_length,
            block_size=self._block_size,
        )
        graphs.capture()
        return graphs

    def trim(self) -> None:
        """Do nothing: torch has the memory of all results back already."""

    def bind_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def sampling(self, vocab_size: int) -> SamplingKernels:
        """See Backend. Kernels are compiled now, so that no request has to wait for the compiler."""
        if self.device.type == "cuda":
            compile_for(vocab_size, self.device)
        return TritonSampling()

    def _product(self, weight: Weight, *, bits: int | None, is_gated: bool = False) -> Product:
        """`bits`: of a float matrix that is to be quantized now."""
        if isinstance(weight, StoredMatrix):
            return self._quantized.product(weight)
        if bits is not None:
            return self._quantized.rounded(weight, bits=bits)
        return self._dense.product(weight, is_gated=is_gated)

    def _rounded_bits(self, options: BackendOptions) -> int | None:
        """Bits that float weights are quantized to at load; None: not at all."""
        if options.quantization in ("none", "auto", "stored"):
            return None
        if options.quantization not in _ROUNDED_BITS:
            raise ConfigError(f"engine.quantization {options.quantization!r:.40} is not made by the GPU kernels")
        if self.dtype is torch.float32:
            raise ConfigError(
                f"engine.quantization is {options.quantization}, whose weights multiply 16-bit rows on a GPU: "
                "set model.dtype to bfloat16 or float16"
            )
        return _ROUNDED_BITS[options.quantization]
