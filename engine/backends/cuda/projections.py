"""What a decoder calls: projections, alone, added to the residual stream, or gated, over matrices of any form."""

import torch
from torch import Tensor

from engine.backends.cuda.products import Product
from engine.kernels.triton.activation import silu_mul
from engine.model.layers.linear import gate_values
from engine.model.spec import Activation


class CudaProjection:
    """A matrix of weights with its bias."""

    __slots__ = ("_dtype", "_product", "bias")

    def __init__(self, product: Product, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self._product = product
        self.bias = bias  # [out_features]
        self._dtype = out_dtype

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return self._product.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._product.fuses(len(x)):
            return self._product.multiply(x, self.bias, self._dtype)
        out = x.new_empty(x.shape[0], self._product.out_features, dtype=self._dtype)
        self._product.fill(x, self.bias, out)
        return out


class CudaClosing(CudaProjection):
    """A projection that adds few rows to the residual stream itself, and leaves many to the norm that follows."""

    __slots__ = ()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:  # type: ignore[override]
        if not self._product.fuses(len(x)):
            return self._product.multiply(x, self.bias, self._dtype)
        self._product.fill(x, self.bias, residual, residual=residual)
        return None


class CudaGated(CudaProjection):
    """A stacked projection followed by a gate: SwiGLU's in our kernels, others by torch."""

    __slots__ = ("_activation",)

    def __init__(self, product: Product, bias: Tensor | None, out_dtype: torch.dtype, activation: Activation) -> None:
        """`product`: one made for a gate where the activation is SiLU."""
        super().__init__(product, bias, out_dtype)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if self._activation is not Activation.SILU:
            return gate_values(super().__call__(x), self._activation)
        out = x.new_empty(x.shape[0], self._product.out_features // 2)
        # Our kernels gate without a bias.
        if self.bias is None and self._product.fuses(len(x), is_gated=True):
            self._product.fill(x, None, out, is_gated=True)
        else:
            silu_mul(self._product.multiply(x, self.bias, self._dtype), out)
        return out
