"""Dense layers in plain torch: the reference for all packed or fused forms."""

from torch import Tensor
from torch.nn import functional as F

from engine.model.backend import Projection
from engine.model.spec import Activation


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
    """`activation(gate(x)) * up(x)` of one stacked matrix (SwiGLU, GEGLU: Shazeer, 2020)."""

    __slots__ = ("_activation",)

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation = Activation.SILU) -> None:
        super().__init__(weight, bias)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features / 2]`."""
        return gate_values(F.linear(x, self.weight, self.bias), self._activation)


class StackedGate:
    """`activation(gate) * up` of the result of a projection, gates first."""

    __slots__ = ("_activation", "_projection")

    def __init__(self, projection: Projection, activation: Activation) -> None:
        self._projection = projection
        self._activation = activation

    @property
    def nbytes(self) -> int:
        return self._projection.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features / 2]`."""
        return gate_values(self._projection(x), self._activation)


def gate_values(stacked: Tensor, activation: Activation) -> Tensor:
    """Gate `[num_rows, 2 * size]`, gates first. Returns `[num_rows, size]`."""
    gate, up = stacked.chunk(2, dim=-1)
    opened = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
    return opened.mul_(up)


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
