"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from torch import Tensor
from torch.nn import functional as F


class RMSNorm:
    """Scales the last dimension to unit root mean square, times a weight; adds a layer's output first."""

    __slots__ = ("_eps", "_shape", "weight")

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
