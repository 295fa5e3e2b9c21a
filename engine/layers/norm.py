"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from torch import Tensor
from torch.nn import functional as F


class RMSNorm:
    """Scale the last dimension to unit root mean square, times a weight."""

    __slots__ = ("_eps", "_shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [size]
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)


class HeadNorm:
    """RMSNorm over each head, with one weight for queries and one for keys (Qwen3)."""

    __slots__ = ("_eps", "_head_dim", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [num_heads + num_kv_heads, head_dim]
        self._eps = eps
        self._head_dim = weight.shape[-1]

    def apply_(self, heads: Tensor) -> None:
        """Normalise `[num_rows, num_heads + num_kv_heads, head_dim]` in place."""
        heads.copy_(F.rms_norm(heads, (self._head_dim,), None, self._eps))
        heads.mul_(self.weight)
