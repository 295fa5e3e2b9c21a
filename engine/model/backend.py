"""What a decoder asks of a device: how its matrices are kept and multiplied, its norms, its attention.

A backend is chosen once, at start (`engine.backends.select`). It takes each weight as the loader hands it over, keeps
it in the form that its kernels like best, and returns small callables; the decoder composes them and never asks
where it runs. Results may lie in buffers that belong to the backend: each says how long they are valid.
"""

from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.config import ModelArchitecture
from engine.model.layers.attention import AttentionBackend, AttentionPlan, AttentionSpec
from engine.sampling.backend import SamplingKernels
from engine.types.step_inputs import StepInputs


class ProjectionRole(Enum):
    """What a projection is for: results of different roles never share a buffer within a layer."""

    QKV = "qkv"
    OUTPUT = "output"
    DOWN = "down"


class Projection(Protocol):
    """A matrix of weights, with its bias and whatever is fused behind it."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights hold."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` to `[num_rows, out_features]`, valid until the next call in the same role."""
        ...


class Closing(Protocol):
    """The projection that ends a block: its product belongs to the residual stream."""

    @property
    def nbytes(self) -> int:
        """Memory that the weights hold."""
        ...

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Add the product of `x` `[num_rows, in_features]` to `residual` `[num_rows, hidden_size]` in place.

        Or leave that to the norm that follows: then the product, valid until the next call in the same role.
        """
        ...


class Norm(Protocol):
    """Residual addition and root-mean-square normalisation in one pass."""

    @property
    def weight(self) -> Tensor:
        """Scale of the norm, `[size]`."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the weight holds."""
        ...

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place; the normalised sum, `[num_rows, size]`, valid until the next norm.

        For projections of the same backend alone: they agree upon how its rows lie.
        """
        ...


class Embedding(Protocol):
    """Token ids to the first hidden states."""

    @property
    def nbytes(self) -> int:
        """Memory held beside what an output head already counts."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 `[num_rows]` to `[num_rows, hidden_size]`, the caller's until the next step."""
        ...


class RecordableModel(Protocol):
    """What a backend runs to record a step: `engine.model.decoder.Decoder`."""

    @property
    def config(self) -> ModelArchitecture:
        """The geometry of its layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Device that the model is computed on."""
        ...

    @property
    def embedding(self) -> Embedding:
        """As this backend made it."""
        ...

    def forward(self, token_ids: Tensor, plan: AttentionPlan, wanted: Tensor | None = None) -> Tensor:
        """Hidden states before the final norm, `[num_rows, hidden_size]`; of the `wanted` rows alone, if given."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` from `forward` to float32 `[num_rows, vocab_size]`."""
        ...

    def logits_of_embedded(self, embedded: Tensor, plan: AttentionPlan) -> Tensor:
        """Logits of every row from its embedding on, `[num_rows, hidden_size]`, which is overwritten."""
        ...


class StepGraphs(Protocol):
    """Whole steps recorded once and replayed."""

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        """Fill the cache; float32 logits of the wanted rows, valid until the next call; None: no recording serves.

        `token_ids`: int64 `[num_rows]`, on the device, for some may be known only there. `rows`: int64
        `[num_wanted]`; all in their order when None.
        """
        ...


class Backend(Protocol):
    """Everything a decoder needs from one device. Weights are in the backend's dtype, on its device, contiguous."""

    @property
    def name(self) -> str:
        """For logs and figures, with what distinguishes it: "torch", "cpu-amx", "triton"."""
        ...

    @property
    def device(self) -> torch.device:
        """Where step inputs and results live."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        ...

    def projection(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> Projection:
        """`x @ weight.T + bias` for `[out_features, in_features]`; the backend may keep or drop `weight`."""
        ...

    def closing(self, weight: Tensor, bias: Tensor | None, role: ProjectionRole) -> Closing:
        """A projection as above, onto the residual stream."""
        ...

    def gated(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """`silu(x @ gate.T) * (x @ up.T)`; `weight`: gate's rows, then up's. The result has half as many columns.

        It is for the projection in the role DOWN alone: the two agree upon how its rows lie.
        """
        ...

    def head(self, weight: Tensor) -> Projection:
        """The output head: float32 logits."""
        ...

    def embedding(self, weight: Tensor) -> Embedding:
        """Rows of `[vocab_size, hidden_size]`."""
        ...

    def tied(self, weight: Tensor) -> tuple[Embedding, Projection]:
        """Embedding and head over one matrix, held once; the embedding's `nbytes` is zero."""
        ...

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """RMSNorm over the hidden size."""
        ...

    def attention(self, spec: AttentionSpec, cache: PagedKVCache) -> AttentionBackend:
        """Attention of all layers over one paged cache."""
        ...

    def graphs(
        self, model: RecordableModel, attention: AttentionBackend, *, max_rows: int, max_length: int
    ) -> StepGraphs | None:
        """Steps of up to `max_rows` decoding rows recorded ahead; None where recording gains nothing."""
        ...

    def trim(self) -> None:
        """Give back the memory of results: steps take as much of it again as they need. Recorded steps keep theirs."""
        ...

    def bind_thread(self) -> None:
        """Called once, by the thread that will make all later calls."""
        ...

    def sampling(self, vocab_size: int) -> SamplingKernels:
        """Argmax and random draws over logits `[num_rows, vocab_size]`, whatever way to draw a request asks for."""
        ...
