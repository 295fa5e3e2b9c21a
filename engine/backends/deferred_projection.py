"""A closing projection for backends whose products cannot be added to existing values."""

from torch import Tensor

from engine.model.backend import Projection


class DeferredProjection:
    """A projection that leaves its product to be added by the norm that follows; see engine.model.backend.Closing."""

    __slots__ = ("projection",)

    def __init__(self, projection: Projection) -> None:
        self.projection = projection

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return self.projection.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Project `[num_rows, in_features]` to `[num_rows, out_features]`; `residual` is not used."""
        return self.projection(x)
