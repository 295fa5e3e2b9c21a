"""Projections to which each row's adapter adds."""

from torch import Tensor

from engine.adapters.kernels import AdapterKernels
from engine.model.backend import Closing, Projection


class AdaptedProjection:
    """A projection, and what adapters add to its result."""

    __slots__ = ("_adapters", "_projection", "_site")

    def __init__(self, projection: Projection, adapters: AdapterKernels, site: int) -> None:
        """`site`: see `engine.adapters.packing.site_number`."""
        self._projection = projection
        self._adapters = adapters
        self._site = site

    @property
    def nbytes(self) -> int:
        """Memory of the projection's own weights."""
        return self._projection.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = self._projection(x)
        self._adapters.add_(self._site, x, out)
        return out


class AdaptedClosing:
    """A projection that closes a block, and what adapters add to its result or to the residual stream."""

    __slots__ = ("_adapters", "_closing", "_site")

    def __init__(self, closing: Closing, adapters: AdapterKernels, site: int) -> None:
        """`site`: see `engine.adapters.packing.site_number`."""
        self._closing = closing
        self._adapters = adapters
        self._site = site

    @property
    def nbytes(self) -> int:
        """Memory of the projection's own weights."""
        return self._closing.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        product = self._closing(x, residual)
        self._adapters.add_(self._site, x, residual if product is None else product)
        return product
