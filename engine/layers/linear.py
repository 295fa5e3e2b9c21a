"""Dense projection: the one place where a matrix product with weights happens."""

from torch import Tensor
from torch.nn import functional as F


class Linear:
    """`x @ weight.T + bias`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` to `[num_rows, out_features]`."""
        return F.linear(x, self.weight, self.bias)
