"""Triton kernels on a GPU: fused elementwise passes, paged attention, sampling; products by the vendor's library.

In deterministic mode products are computed by `engine.kernels.triton.gemm_fixed` and attention in fixed runs of keys,
so that a token's result does not depend on batch, chunks or step. Results are tensors of torch's caching
allocator: in the steady state nothing is allocated on the device.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.cuda.attention import CudaAttention
from engine.backends.options import BackendOptions
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_few import MAX_ROWS, FewRowsWorkspace, gemm_few
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.sampling import TritonSampling, compile_for
from engine.kernels.triton.tuning import FewRowsLaunch, GemmLaunch, LaunchTable, load_table
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.backend import ProjectionRole, RecordableModel, StepGraphs
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.linear import TokenEmbedding
from engine.sampling.backend import SamplingKernels
from tandem.errors import ConfigError

_FIRST_WITH_PDL = (9, 0)
"""Least compute capability with programmatic dependent launch: Hopper."""
_MAX_GRAPH_ROWS = 256
"""Largest batch to record: a larger step computes long enough to hide its launches."""


class _Products:
    """How a backend multiplies: in one fixed order, or few rows by our kernel and many by the vendor's library."""

    def __init__(self, table: LaunchTable, *, dtype: torch.dtype, deterministic: bool, pdl: bool) -> None:
        self.fixed = table.gemm(wide=dtype is torch.float32) if deterministic else None
        self.pdl = pdl
        self.workspace: FewRowsWorkspace | None = None
        """Of the largest product with splits; complete when all projections are made."""
        self._table = None if deterministic or dtype is torch.float32 else table

    def few_rows(self, weight: Tensor, *, is_gated: bool = False) -> FewRowsLaunch | None:
        """Launch of our kernel for a matrix, and memory for its parts; None where the library serves any rows."""
        if self._table is None:
            return None
        features = weight.shape[0] // (2 if is_gated else 1)
        launch = self._table.few_rows(features, weight.shape[1], gated=is_gated)
        if launch is not None and launch.num_splits > 1:
            self._reserve(launch, -(-features // launch.block_n), weight.device)
        return launch

    def _reserve(self, launch: FewRowsLaunch, num_tiles: int, device: torch.device) -> None:
        num_values = num_tiles * launch.num_splits * launch.block_n * MAX_ROWS
        present = self.workspace
        if present is None or present.parts.numel() < num_values or present.arrivals.numel() < num_tiles:
            most_values = max(num_values, 0 if present is None else present.parts.numel())
            most_tiles = max(num_tiles, 0 if present is None else present.arrivals.numel())
            self.workspace = FewRowsWorkspace.allocate(most_values, most_tiles, device)


class CudaProjection:
    """A matrix of weights."""

    __slots__ = ("_few", "_out_dtype", "_products", "bias", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, products: _Products, out_dtype: torch.dtype | None = None
    ) -> None:
        """`out_dtype`: None for the weights' own."""
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self._products = products
        self._few = products.few_rows(weight)
        self._out_dtype = out_dtype or weight.dtype

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        fixed, few = self._products.fixed, self._few
        if fixed is None and (few is None or len(x) > MAX_ROWS):
            return F.linear(x, self.weight, self.bias).to(self._out_dtype)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=self._out_dtype)
        if fixed is not None:
            gemm_fixed(x, self.weight, self.bias, out, fixed)
        elif few is not None:
            products = self._products
            gemm_few(x, self.weight, self.bias, out, few, workspace=products.workspace, pdl=products.pdl)
        return out


class CudaClosing(CudaProjection):
    """A projection that adds few rows to the residual stream itself, and leaves many to the norm that follows."""

    __slots__ = ()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:  # type: ignore[override]
        few, products = self._few, self._products
        if few is None or len(x) > MAX_ROWS:
            return super().__call__(x)
        gemm_few(
            x, self.weight, self.bias, residual, few,
            residual=residual, workspace=products.workspace, pdl=products.pdl,
        )  # fmt: skip
        return None


class CudaGated(CudaProjection):
    """A stacked projection followed by SwiGLU's gate."""

    __slots__ = ("_few_gated",)

    def __init__(self, weight: Tensor, bias: Tensor | None, products: _Products) -> None:
        super().__init__(weight, bias, products)
        self._few_gated = None if bias is not None else products.few_rows(weight, is_gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.weight.shape[0] // 2)
        few = self._few_gated
        if few is not None and len(x) <= MAX_ROWS:
            gemm_few(x, self.weight, None, out, few, is_gated=True, pdl=self._products.pdl)
            return out
        silu_mul(super().__call__(x), out)
        return out


class CudaNorm:
    """Adds the delta to the residual stream and norms it, in one pass."""

    __slots__ = ("_eps", "_pdl", "weight")

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

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError for a quantization other than none."""
        if options.quantization != "none":
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
        self._products = _Products(
            self._table, dtype=self.dtype, deterministic=options.deterministic, pdl=self._pdl
        )

    def projection(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> CudaProjection:
        return CudaProjection(weight, bias, self._products)

    def closing(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> CudaClosing:
        return CudaClosing(weight, bias, self._products)

    def gated(self, weight: Tensor, bias: Tensor | None) -> CudaGated:
        return CudaGated(weight, bias, self._products)

    def head(self, weight: Tensor) -> CudaProjection:
        return CudaProjection(weight, None, self._products, torch.float32)

    def embedding(self, weight: Tensor) -> TokenEmbedding:
        return TokenEmbedding(weight)

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, CudaProjection]:
        return TokenEmbedding(weight, is_shared=True), self.head(weight)

    def norm(self, weight: Tensor, eps: float) -> CudaNorm:
        return CudaNorm(weight, eps, pdl=self._pdl)

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> CudaAttention:
        self._block_size = cache.block_size
        self._attention = CudaAttention(spec, cache, self._table, deterministic=self._deterministic, pdl=self._pdl)
        return self._attention

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_length: int
    ) -> StepGraphs | None:
        """See Backend. `attention` must be the last one that this backend made; else nothing is recorded."""
        if self.device.type != "cuda" or self._attention is None or attention is not self._attention:
            return None
        from engine.backends.cuda.graphs import CudaRecorder, DecodeGraphs, graph_batch_sizes

        graphs = DecodeGraphs(
            model,
            self._attention,
            CudaRecorder(self.device),
            batch_sizes=graph_batch_sizes(min(max_rows, _MAX_GRAPH_ROWS)),
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
