"""Backend of plain torch operators: runs wherever torch does, and is the reference for every other backend."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.adapters.kernels import AdapterKernels, TorchAdapters
from engine.backends.thread_priority import lower_thread_priority
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.backend import Projection, ProjectionRole, RecordableModel
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight, as_tensor
from engine.model.layers.attention import AttentionBackend, AttentionSpec
from engine.model.layers.composed import SoftCappedHead
from engine.model.layers.grouped_attention import attention_of_groups
from engine.model.layers.linear import GatedLinear, HeadLinear, Linear, StackedGate, TokenEmbedding
from engine.model.layers.mixture import Expert, ExpertRouter, GroupedMixture
from engine.model.layers.norm import LayerNorm, PassThrough, RMSNorm, TorchRowNorm
from engine.model.layers.torch_attention import TorchAttention
from engine.model.spec import Activation, MoeSpec, NormKind, NormSpec
from engine.sampling.backend import SamplingKernels, TorchSampling


class DeferredProjection:
    """A projection that leaves its product to be added by the norm that follows; see engine.model.backend.Closing."""

    __slots__ = ("projection",)

    def __init__(self, projection: Projection) -> None:
        self.projection = projection

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return self.projection.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features]`; `residual` is not used."""
        return self.projection(x)


class TorchBackend:
    """Implements engine.model.backend.Backend. Results are new tensors."""

    name = "torch"
    packs_matrices = False
    keeps_stored = False
    quantizes_to = None

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        takes_adapters: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._takes_adapters = takes_adapters

    def keeps(self, matrix: StoredMatrix) -> bool:
        return False

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Linear:
        return Linear(as_tensor(weight), bias)

    def closing(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> DeferredProjection:
        return DeferredProjection(self.projection(weight, bias, role))

    def adapters(self) -> AdapterKernels | None:
        return TorchAdapters(self.device) if self._takes_adapters else None

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> GatedLinear:
        return GatedLinear(as_tensor(weight), bias, activation)

    def gate(self, stacked: Projection, activation: Activation, size: int) -> StackedGate:
        return StackedGate(stacked, activation)

    def mixture(self, moe: MoeSpec, router: Tensor, matrices: Iterator[Weight]) -> GroupedMixture:
        experts = [
            Expert(gate_up=GatedLinear(as_tensor(gate_up), None), down=Linear(as_tensor(next(matrices))))
            for gate_up in matrices
        ]
        return GroupedMixture(moe, ExpertRouter(router), experts)

    def head(self, weight: Tensor) -> HeadLinear:
        return HeadLinear(weight)

    def soft_capped(self, head: Projection, cap: float) -> SoftCappedHead:
        return SoftCappedHead(head, cap)

    def embedding(self, weight: Tensor) -> TokenEmbedding:
        return TokenEmbedding(weight)

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, HeadLinear]:
        return TokenEmbedding(weight, is_shared=True), HeadLinear(weight)

    def norm(
        self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None, *, feeds_mixture: bool = False
    ) -> RMSNorm | LayerNorm:
        return RMSNorm(weight, spec.eps) if spec.kind is NormKind.RMS else LayerNorm(weight, bias, spec.eps)

    def no_norm(self, size: int) -> PassThrough:
        return PassThrough()

    def row_norm(self, weight: Tensor, eps: float, kind: NormKind) -> TorchRowNorm:
        return TorchRowNorm(weight, eps, kind)

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> AttentionBackend:
        return attention_of_groups(spec, cache, TorchAttention)

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_tokens: int, max_length: int
    ) -> None:
        """Return None: nothing is recorded, operators are called one by one."""

    def trim(self) -> None:
        """Do nothing: torch has the memory of all results back already."""

    def bind_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            lower_thread_priority()

    def sampling(self, vocab_size: int) -> SamplingKernels:
        return TorchSampling()
