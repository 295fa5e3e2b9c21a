"""Norms in plain torch: by root mean square (Zhang and Sennrich, 2019), and to zero mean (Ba et al., 2016)."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.parallel_group import ParallelGroup
from engine.model.spec import NormKind


class RMSNorm:
    """Scales the last dimension to unit root mean square, times a weight; adds a layer's output first."""

    __slots__ = ("_eps", "_shape", "weight")
    bias = None

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [size]
        self._eps = eps
        self._shape = tuple(weight.shape)

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place, `[..., size]`. Returns the normalised sum as a new tensor."""
        if delta is not None:
            residual += delta
        return F.rms_norm(residual, self._shape, self.weight, self._eps)


class LayerNorm:
    """Scales the last dimension to zero mean and unit variance, times a weight, plus a bias; adds a layer's output
    first.
    """

    __slots__ = ("_eps", "_shape", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight  # [size]
        self.bias = bias  # [size]
        self._eps = eps
        self._shape = tuple(weight.shape)

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place, `[..., size]`. Returns the normalised sum as a new tensor."""
        if delta is not None:
            residual += delta
        return F.layer_norm(residual, self._shape, self.weight, self.bias, self._eps)


class PassThrough:
    """Stands where a model has no norm: adds a layer's output, and returns the sum."""

    __slots__ = ()

    nbytes = 0
    bias = None

    @property
    def weight(self) -> Tensor:
        """No values."""
        return torch.empty(0)

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place. Returns the sum, valid until the next addition."""
        if delta is not None:
            residual += delta
        return residual


class RowNorm(Protocol):
    """Norms rows, or groups of neighbouring values of each, in place."""

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        ...

    def apply_(self, rows: Tensor) -> Tensor:
        """Norm `[num_rows, num_groups * size]`, contiguous within rows. Returns `rows`."""
        ...


class TorchRowNorm:
    """A RowNorm in plain torch."""

    __slots__ = ("_eps", "_kind", "weight")

    def __init__(self, weight: Tensor, eps: float, kind: NormKind) -> None:
        self.weight = weight  # [num_groups, size]
        self._eps = eps
        self._kind = kind

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply_(self, rows: Tensor) -> Tensor:
        groups = rows.view(*rows.shape[:-1], *self.weight.shape)
        size = self.weight.shape[-1:]
        norm = F.rms_norm if self._kind is NormKind.RMS else F.layer_norm
        groups.copy_(norm(groups, size, eps=self._eps).mul_(self.weight))
        return rows


class SplitRowNorm:
    """RMSNorm of rows of which every rank has a part, or several ranks the same part."""

    __slots__ = ("_eps", "_group", "weight")

    def __init__(self, weight: Tensor, eps: float, group: ParallelGroup) -> None:
        self.weight = weight  # [size], this rank's part
        self._eps = eps
        self._group = group

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply_(self, rows: Tensor) -> Tensor:
        # All ranks have parts of one size, each as often as the others: so the mean over all is the mean over these.
        squares = self._group.all_reduce_(rows.float().square().mean(dim=-1, keepdim=True))
        factor = torch.rsqrt(squares / self._group.size + self._eps)
        return rows.copy_((rows * factor).mul_(self.weight))


class HeadNorm:
    """RMSNorm over each head, with one weight for queries and one for keys (Qwen3)."""

    __slots__ = ("eps", "key", "query")

    def __init__(self, query: Tensor, key: Tensor, eps: float) -> None:
        self.query = query  # [head_dim]
        self.key = key  # [head_dim]
        self.eps = eps

    @property
    def nbytes(self) -> int:
        """Memory of both weights."""
        return self.query.nbytes + self.key.nbytes

    def apply_(self, queries: Tensor, keys: Tensor) -> None:
        """Normalise `[num_rows, num_heads, head_dim]` and `[num_rows, num_kv_heads, head_dim]` in place."""
        for heads, weight in ((queries, self.query), (keys, self.key)):
            heads.copy_(F.rms_norm(heads, tuple(weight.shape), None, self.eps))
            heads.mul_(weight)
