"""The interface between a decoder and its device: how matrices are stored and multiplied, norms, attention.

A backend is chosen once, at start (`engine.backends.select`). It takes each weight from the loader, stores it in the
form that suits its kernels, and returns small callables, which the decoder composes without knowing the device.
Results may lie in buffers that belong to the backend: each docstring says how long they are valid.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from engine.adapters.kernels import AdapterKernels
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight
from engine.model.layers.attention import AttentionBackend, AttentionPlan, AttentionSpec
from engine.model.layers.norm import RowNorm
from engine.model.spec import Activation, ModelSpec, MoeSpec, NormKind, NormSpec
from engine.sampling.backend import SamplingKernels
from engine.types.step_inputs import StepInputs


class ProjectionRole(Enum):
    """Role of a projection: results of different roles never share a buffer within a layer."""

    QKV = "qkv"
    OUTPUT = "output"
    DOWN = "down"
    STACKED = "stacked"
    """Gates and what they open, before both are multiplied."""


class Projection(Protocol):
    """A matrix of weights, with its bias and the operations fused into it."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights hold."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features]`, valid until the next call in the same
        role.
        """
        ...


class Closing(Protocol):
    """The projection that ends a block; its product is added to the residual stream."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights hold."""
        ...

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Add the product of `x` `[num_rows, in_features]` to `residual` `[num_rows, hidden_size]` in place.

        Or leave the addition to the following norm, and return the product, valid until the next call in the same role.
        """
        ...


class Norm(Protocol):
    """Residual addition and normalisation in one pass."""

    @property
    def weight(self) -> Tensor:
        """Scale of the norm, `[size]`."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """Added after that, `[size]`; None: nothing."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the weight holds."""
        ...

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place. Returns the normalised sum, `[num_rows, size]`, valid until the next
        norm.

        Only for projections of the same backend: its rows may have a layout that only these understand.
        """
        ...


class Embedding(Protocol):
    """Looks up the first hidden states of token ids."""

    @property
    def nbytes(self) -> int:
        """Memory of the table; zero where an output head counts it."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 `[num_rows]`. Returns `[num_rows, hidden_size]`, which the caller may change until the next
        step.
        """
        ...


class RecordableModel(Protocol):
    """The parts of `engine.model.decoder.Decoder` that a backend runs to record a step."""

    @property
    def config(self) -> ModelSpec:
        """Geometry of the model's layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Device that the model is computed on."""
        ...

    @property
    def embedding(self) -> Embedding:
        """Embedding that this backend made."""
        ...

    def forward(self, token_ids: Tensor, plan: AttentionPlan, wanted: Tensor | None = None) -> Tensor:
        """Hidden states before the final norm, `[num_rows, hidden_size]`; only of the `wanted` rows, if given."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, float32 `[num_rows, vocab_size]`, of hidden states `[num_rows, hidden_size]` from `forward`."""
        ...

    def logits_of_embedded(self, embedded: Tensor, plan: AttentionPlan) -> Tensor:
        """Logits of all rows from their embeddings, `[num_rows, hidden_size]`, which are overwritten."""
        ...


class StepGraphs(Protocol):
    """Whole steps recorded once and replayed."""

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        """Fill the cache. Returns float32 logits of the wanted rows, valid until the next call; None: no recording
        fits.

        `token_ids`: int64 `[num_rows]`, on the device, since the host may not know them. `rows`: int64
        `[num_wanted]`; None: all in order.
        """
        ...


class Backend(Protocol):
    """Everything a decoder needs from one device. Weights are in the backend's dtype, on its device, contiguous."""

    @property
    def name(self) -> str:
        """Name with its variant, for logs and figures: "torch", "cpu-amx", "triton"."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of step inputs and results."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        ...

    @property
    def packs_matrices(self) -> bool:
        """Whether projections and heads copy their matrix, so that it may be a view of a file that is still mapped."""
        ...

    @property
    def keeps_stored(self) -> bool:
        """Whether it keeps any stored matrix: else none has to be read."""
        ...

    @property
    def quantizes_to(self) -> WeightScheme | None:
        """What the loader quantizes the projections' matrices to, however they are stored; None: it does not."""
        ...

    def keeps(self, matrix: StoredMatrix) -> bool:
        """Whether projections take this matrix as it is stored; of others they want the restored values.

        What they take may view a file that is unmapped later, so they pack it.
        """
        ...

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Projection:
        """Make `x @ weight.T + bias` of `[out_features, in_features]`; the backend may keep or drop `weight`."""
        ...

    def closing(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Closing:
        """Make a projection as above, whose product is added to the residual stream."""
        ...

    def adapters(self) -> AdapterKernels | None:
        """Make what adds adapters to projections; None where the options ask for none."""
        ...

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> Projection:
        """Make `activation(x @ gate.T) * (x @ up.T)`; `weight`: gate's rows, then up's. The result has half as many
        columns.

        Only for the projection in the role DOWN: the result's rows may have a layout that only it understands.
        """
        ...

    def gate(self, stacked: Projection, activation: Activation, size: int) -> Projection:
        """Do as `gated`, with the product of a projection that this backend has made in the role STACKED; `size`:
        columns of the result.
        """
        ...

    def mixture(self, moe: MoeSpec, router: Tensor, matrices: Iterator[Weight]) -> Projection:
        """Make a mixture of experts in the role DOWN: what each row's experts return, weighted and summed.

        `router`: `[num_experts, hidden_size]`, one more row for a shared expert. `matrices`: of each expert two, as
        `gated` takes them for SiLU and as `projection` does, the shared expert's last. Each is taken once the one
        before is packed, so that beside what is kept only one is in memory.

        Experts are chosen in float32 (`engine.model.layers.mixture.route`) and summed in float32, in the order of their
        numbers: a row's result depends on the other rows only where products do.
        """
        ...

    def head(self, weight: Tensor) -> Projection:
        """Make the output head, which returns float32 logits."""
        ...

    def soft_capped(self, head: Projection, cap: float) -> Projection:
        """Make an output head whose logits are `cap * tanh(logits / cap)` of those of `head`, from this backend."""
        ...

    def embedding(self, weight: Tensor) -> Embedding:
        """Make an embedding that looks up rows of `[vocab_size, hidden_size]`."""
        ...

    def tied(self, weight: Tensor) -> tuple[Embedding, Projection]:
        """Make embedding and head over one matrix, stored once; the embedding's `nbytes` is zero."""
        ...

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None, *, feeds_mixture: bool = False) -> Norm:
        """Make a norm over the hidden size; `feeds_mixture`: a mixture of experts reads its rows, one by one."""
        ...

    def no_norm(self, size: int) -> Norm:
        """Make what stands in a norm's place where a model has none: it adds, and returns the sum of `size` columns."""
        ...

    def row_norm(self, weight: Tensor, eps: float, kind: NormKind) -> RowNorm:
        """Make a norm of groups of each row's values, `[num_groups, size]`, without a bias."""
        ...

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> AttentionBackend:
        """Make the attention of all layers over one paged cache."""
        ...

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_tokens: int, max_length: int
    ) -> StepGraphs | None:
        """Record steps ahead: of up to `max_rows` decoding rows, and of up to `max_tokens` rows with chunks of prompts
        where that gains anything. None where nothing does.
        """
        ...

    def trim(self) -> None:
        """Free the memory of results, which later steps allocate again as needed. Recorded steps keep theirs."""
        ...

    def bind_thread(self) -> None:
        """Called once, by the thread that will make all later calls."""
        ...

    def sampling(self, vocab_size: int) -> SamplingKernels:
        """Make the kernels that choose tokens from logits `[num_rows, vocab_size]`."""
        ...
