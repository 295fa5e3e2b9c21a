"""Triton kernels on a GPU: fused elementwise passes, paged attention, sampling; products by the vendor's library.

In deterministic mode products are computed by `engine.kernels.triton.gemm_fixed` and attention in fixed runs of keys,
so that a token's result does not depend on batch, chunks or step. Results are tensors of torch's caching
allocator: in the steady state nothing is allocated on the device.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.cuda.attention import CudaAttention
from engine.backends.deferred_projection import DeferredProjection
from engine.backends.options import BackendOptions
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.sampling import TritonSampling, compile_for
from engine.kernels.triton.tuning import GemmLaunch, load_table
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.backend import ProjectionRole, RecordableModel, StepGraphs
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.linear import TokenEmbedding
from engine.sampling.backend import SamplingKernels
from tandem.errors import ConfigError

_MAX_GRAPH_ROWS = 256
"""Largest batch to record: a larger step computes long enough to hide its launches."""


class CudaProjection:
    """A matrix of weights; with a launch, every row is summed in one fixed order."""

    __slots__ = ("_launch", "_out_dtype", "bias", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, launch: GemmLaunch | None, out_dtype: torch.dtype | None = None
    ) -> None:
        """`out_dtype`: None for the weights' own."""
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self._launch = launch
        self._out_dtype = out_dtype or weight.dtype

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self._launch is None:
            return F.linear(x, self.weight, self.bias).to(self._out_dtype)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=self._out_dtype)
        gemm_fixed(x, self.weight, self.bias, out, self._launch)
        return out


class CudaGated(CudaProjection):
    """A stacked projection followed by SwiGLU's gate."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        stacked = super().__call__(x)
        out = x.new_empty(x.shape[0], stacked.shape[1] // 2)
        silu_mul(stacked, out)
        return out


class CudaNorm:
    """Adds the delta to the residual stream and norms it, in one pass."""

    __slots__ = ("_eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [size]
        self._eps = eps

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        out = torch.empty_like(residual)
        add_rms_norm(residual, delta, self.weight, self._eps, out)
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
        gpu = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else ""
        self._table = load_table(gpu)
        self._deterministic = options.deterministic
        self._attention: CudaAttention | None = None
        self._block_size = 0
        self._gemm = self._table.gemm(wide=self.dtype is torch.float32) if options.deterministic else None

    def projection(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> CudaProjection:
        return CudaProjection(weight, bias, self._gemm)

    def closing(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> DeferredProjection:
        return DeferredProjection(self.projection(weight, bias, role))

    def gated(self, weight: Tensor, bias: Tensor | None) -> CudaGated:
        return CudaGated(weight, bias, self._gemm)

    def head(self, weight: Tensor) -> CudaProjection:
        return CudaProjection(weight, None, self._gemm, torch.float32)

    def embedding(self, weight: Tensor) -> TokenEmbedding:
        return TokenEmbedding(weight)

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, CudaProjection]:
        return TokenEmbedding(weight, is_shared=True), self.head(weight)

    def norm(self, weight: Tensor, eps: float) -> CudaNorm:
        return CudaNorm(weight, eps)

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> CudaAttention:
        self._block_size = cache.block_size
        self._attention = CudaAttention(spec, cache, self._table, deterministic=self._deterministic)
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
