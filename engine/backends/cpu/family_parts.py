"""Parts of the CPU backend that only some models have: other norms, gates apart, experts, capped logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.buffers import Buffers
from engine.kernels.cpu.gemm import FEW_ROWS, whole_tiles
from engine.kernels.cpu.mixture import PackedMixture
from engine.kernels.cpu.norms import CompiledNorm, CpuActivations
from engine.model.backend import Projection, ProjectionRole


class CompiledInputNorm:
    """Adds the delta to the residual stream and norms it in one pass, or copies it where a model has no norm."""

    __slots__ = ("_buffers", "_gives_tiles", "_norm", "weight")

    def __init__(self, norm: CompiledNorm, weight: Tensor, buffers: Buffers, *, gives_tiles: bool) -> None:
        """`weight`: `[size]`, or of no size; `gives_tiles`: with many rows, write tiles, which the following projection
        reads.
        """
        self._norm = norm
        self._buffers = buffers
        self._gives_tiles = gives_tiles
        self.weight = weight

    @property
    def bias(self) -> Tensor | None:
        """Added after the scaling, `[size]`."""
        return self._norm.bias

    @property
    def nbytes(self) -> int:
        return self._norm.nbytes

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        rows, size = residual.shape
        out = self._buffers.rows("normed", whole_tiles(rows), size, residual.dtype)[:rows]
        norm = self._norm.add_to_tiles if self._gives_tiles and rows > FEW_ROWS else self._norm.add
        norm(residual, delta, out)
        return out


class StackedGated:
    """A gate on the result of a stacked projection."""

    __slots__ = ("_buffers", "_gate", "_gate_to_tiles", "_padding", "_projection")

    def __init__(
        self,
        projection: Projection,
        gate: Callable[[Tensor, Tensor], None],
        buffers: Buffers,
        *,
        gate_to_tiles: Callable[[Tensor, Tensor], None] | None = None,
        padding: int = 0,
    ) -> None:
        """`gate` writes the gated values of its first argument to the second. `gate_to_tiles`: does it with many rows,
        as tiles, which the following projection reads; `padding`: of rows.
        """
        self._projection = projection
        self._gate = gate
        self._gate_to_tiles = gate_to_tiles
        self._buffers = buffers
        self._padding = padding

    @property
    def nbytes(self) -> int:
        return self._projection.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        stacked = self._projection(x)
        rows, inner = stacked.shape[0], stacked.shape[1] // 2
        out = self._buffers.rows("gated", whole_tiles(rows), inner, stacked.dtype, padding=self._padding)[:rows]
        to_tiles = None if rows <= FEW_ROWS else self._gate_to_tiles
        (to_tiles or self._gate)(stacked, out)
        return out


class RoutedExperts:
    """A mixture of experts whose results lie in the buffer of the role DOWN."""

    __slots__ = ("_buffers", "_mixture")

    def __init__(self, mixture: PackedMixture, buffers: Buffers) -> None:
        self._mixture = mixture
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        return self._mixture.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        mixture, rows = self._mixture, x.shape[0]
        out = self._buffers.rows(ProjectionRole.DOWN.value, whole_tiles(rows), mixture.size, mixture.dtype)[:rows]
        mixture(x, out, self._buffers.rows("routed", rows, mixture.scratch_bytes, torch.uint8))
        return out


class CappedHead:
    """An output head with bounded logits."""

    __slots__ = ("_activations", "_cap", "_head")

    def __init__(self, head: Projection, cap: float, activations: CpuActivations) -> None:
        self._head = head
        self._cap = cap
        self._activations = activations

    @property
    def nbytes(self) -> int:
        return self._head.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._activations.soft_cap_(self._head(x), self._cap)
