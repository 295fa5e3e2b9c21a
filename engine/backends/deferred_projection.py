"""For backends whose products do not add to what is there."""

from torch import Tensor

from engine.model.backend import Projection


class LaterAdded:
    """A projection that leaves its product to be added by the norm that follows; see backend.Closing."""

    __slots__ = ("projection",)

    def __init__(self, projection: Projection) -> None:
        self.projection = projection

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return self.projection.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`[num_rows, in_features]` to `[num_rows, out_features]`."""
        return self.projection(x)
