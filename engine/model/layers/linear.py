"""Dense layers in plain torch: the reference for all packed or fused forms."""

from torch import Tensor
from torch.nn import functional as F


class Linear:
    """`x @ weight.T + bias`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features]`."""
        return F.linear(x, self.weight, self.bias)


class GatedLinear(Linear):
    """`silu(gate(x)) * up(x)` of one stacked matrix (SwiGLU: Shazeer, 2020)."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features / 2]`."""
        gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class HeadLinear(Linear):
    """A projection to float32 logits."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, hidden_size]` to float32 `[num_rows, vocab_size]`."""
        return F.linear(x, self.weight, self.bias).float()


class TokenEmbedding:
    """Looks up rows of a table."""

    __slots__ = ("_is_shared", "weight")

    def __init__(self, weight: Tensor, *, is_shared: bool = False) -> None:
        self.weight = weight  # [vocab_size, hidden_size]
        self._is_shared = is_shared

    @property
    def nbytes(self) -> int:
        """Memory of the table; zero when an output head holds the same one."""
        return 0 if self._is_shared else self.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 `[num_rows]`. Returns `[num_rows, hidden_size]`."""
        return F.embedding(token_ids, self.weight)
