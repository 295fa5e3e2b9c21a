"""Triton kernels on a GPU: fused elementwise passes, paged attention, sampling; products by the vendor's library.

In deterministic mode products are computed by `engine.kernels.triton.gemm_fixed` and attention in fixed runs of keys,
so that a token's result does not depend on batch, chunks or step. Results are tensors of torch's caching
allocator: in the steady state nothing is allocated on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.cuda.attention import CudaAttention
from engine.backends.options import BackendOptions
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_few import MAX_ROWS, FewRowsWorkspace, gemm_few
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.sampling import TritonSampling, compile_for
from engine.kernels.triton.tuning import FewRowsLaunch, LaunchTable, OneRowLaunch, load_table
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.backend import Projection, ProjectionRole, RecordableModel, StepGraphs
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight, as_tensor
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.composed import SoftCappedHead
from engine.model.layers.linear import TokenEmbedding, gate_values
from engine.model.layers.norm import LayerNorm, PassThrough, TorchRowNorm
from engine.model.spec import Activation, NormKind, NormSpec
from engine.sampling.backend import SamplingKernels
from tandem.errors import ConfigError

_FIRST_WITH_PDL = (9, 0)
"""Least compute capability with programmatic dependent launch: Hopper."""
_MAX_GRAPH_ROWS = 256
"""Largest batch to record: a larger step computes long enough to hide its launches."""


class _Launches(NamedTuple):
    """Launches of our kernels for one matrix; None where the library serves that many rows."""

    one_row: OneRowLaunch | None
    few_rows: FewRowsLaunch | None

    def serve(self, num_rows: int) -> bool:
        """Whether a kernel of ours multiplies so many rows."""
        return (num_rows <= MAX_ROWS and self.few_rows is not None) or (num_rows == 1 and self.one_row is not None)


class _Products:
    """How a backend multiplies: in one fixed order, or few rows by kernels of ours and many by the vendor's library."""

    def __init__(self, table: LaunchTable, *, dtype: torch.dtype, deterministic: bool, pdl: bool) -> None:
        self.fixed = table.gemm(wide=dtype is torch.float32) if deterministic else None
        self._pdl = pdl
        self._table = None if deterministic or dtype is torch.float32 else table
        # Of the largest product with splits: complete when all projections are made.
        self._workspace: FewRowsWorkspace | None = None

    def launches(self, weight: Tensor, *, is_gated: bool = False) -> _Launches:
        """Find the launches for a matrix, and keep memory for its parts."""
        if self._table is None:
            return _Launches(None, None)
        features, depth = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        few_rows = self._table.few_rows(features, depth, gated=is_gated)
        if few_rows is not None and few_rows.num_splits > 1:
            self._reserve(few_rows, -(-features // few_rows.block_n), weight.device)
        return _Launches(self._table.one_row(features, depth, gated=is_gated), few_rows)

    def multiply_few(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        launches: _Launches,
        *,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        """Fill `out` as `gemm_few` does, for rows that `launches` serve."""
        if len(x) == 1 and launches.one_row is not None:
            gemv(x, weight, bias, out, launches.one_row, residual=residual, is_gated=is_gated, pdl=self._pdl)
        elif launches.few_rows is not None:
            gemm_few(
                x,
                weight,
                bias,
                out,
                launches.few_rows,
                residual=residual,
                workspace=self._workspace,
                is_gated=is_gated,
                pdl=self._pdl,
            )

    def _reserve(self, launch: FewRowsLaunch, num_tiles: int, device: torch.device) -> None:
        num_values = num_tiles * launch.num_splits * launch.block_n * MAX_ROWS
        if (present := self._workspace) is not None:
            num_values = max(num_values, present.parts.numel())
            num_tiles = max(num_tiles, present.arrivals.numel())
        self._workspace = FewRowsWorkspace.allocate(num_values, num_tiles, device)


class CudaProjection:
    """A matrix of weights."""

    __slots__ = ("_launches", "_out_dtype", "_products", "bias", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        products: _Products,
        out_dtype: torch.dtype | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        """`out_dtype`: None for the weights' own."""
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self._products = products
        self._launches = products.launches(weight, is_gated=is_gated)
        self._out_dtype = out_dtype or weight.dtype

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._launches.serve(len(x)):
            return self._of_any(x)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=self._out_dtype)
        self._products.multiply_few(x, self.weight, self.bias, out, self._launches)
        return out

    def _of_any(self, x: Tensor) -> Tensor:
        """Multiply any number of rows."""
        if self._products.fixed is None:
            return F.linear(x, self.weight, self.bias).to(self._out_dtype)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=self._out_dtype)
        gemm_fixed(x, self.weight, self.bias, out, self._products.fixed)
        return out


class CudaClosing(CudaProjection):
    """A projection that adds few rows to the residual stream itself, and leaves many to the norm that follows."""

    __slots__ = ()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:  # type: ignore[override]
        if not self._launches.serve(len(x)):
            return self._of_any(x)
        self._products.multiply_few(x, self.weight, self.bias, residual, self._launches, residual=residual)
        return None


class CudaGated(CudaProjection):
    """A stacked projection followed by a gate: SwiGLU's in our kernels, others by torch."""

    __slots__ = ("_activation",)

    def __init__(self, weight: Tensor, bias: Tensor | None, products: _Products, activation: Activation) -> None:
        super().__init__(weight, bias, products, is_gated=activation is Activation.SILU)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if self._activation is not Activation.SILU:
            return gate_values(super().__call__(x), self._activation)
        out = x.new_empty(x.shape[0], self.weight.shape[0] // 2)
        # Our kernels gate without a bias.
        if self.bias is None and self._launches.serve(len(x)):
            self._products.multiply_few(x, self.weight, None, out, self._launches, is_gated=True)
        else:
            silu_mul(self._of_any(x), out)
        return out


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
    keeps_stored = False
    quantizes_to = None

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError for a quantization."""
        if options.quantization not in ("none", "auto", "stored"):
            raise ConfigError(f"engine.quantization {options.quantization!r:.40} is for the CPU kernels")
        self.name = "triton-deterministic" if options.deterministic else "triton"
        self.device = options.device
        self.dtype = TORCH_DTYPES[options.dtype]
        is_gpu = options.device.type == "cuda"
        self._table = load_table(torch.cuda.get_device_name(options.device) if is_gpu else "")
        self._pdl = is_gpu and torch.cuda.get_device_capability(options.device) >= _FIRST_WITH_PDL
        """Whether kernels start while the one before ends."""
        self._deterministic = options.deterministic
        self._attention: CudaAttention | None = None
        self._block_size = 0
        self._products = _Products(self._table, dtype=self.dtype, deterministic=options.deterministic, pdl=self._pdl)

    def keeps(self, matrix: StoredMatrix) -> bool:
        return False

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> CudaProjection:
        return CudaProjection(as_tensor(weight), bias, self._products)

    def closing(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> CudaClosing:
        return CudaClosing(as_tensor(weight), bias, self._products)

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> CudaGated:
        return CudaGated(as_tensor(weight), bias, self._products, activation)

    def head(self, weight: Tensor) -> CudaProjection:
        return CudaProjection(weight, None, self._products, torch.float32)

    def soft_capped(self, head: Projection, cap: float) -> SoftCappedHead:
        return SoftCappedHead(head, cap)

    def embedding(self, weight: Tensor) -> TokenEmbedding:
        return TokenEmbedding(weight)

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, CudaProjection]:
        return TokenEmbedding(weight, is_shared=True), self.head(weight)

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> CudaNorm | LayerNorm:
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
        """See Backend. `attention` must be the last one that this backend made; else nothing is recorded."""
        if self.device.type != "cuda" or self._attention is None or attention is not self._attention:
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
