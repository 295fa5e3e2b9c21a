"""The interface of layers to the ranks that share a model: sums, and rows gathered."""

from typing import Protocol

from torch import Tensor


class ParallelGroup(Protocol):
    """The ranks of one tensor-parallel model, each its own process. Every rank makes the same calls in the same
    order.
    """

    @property
    def rank(self) -> int:
        """Rank of this process; rank 0 schedules and samples."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, with the same bits on each. Raises RankLost."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the ranks' tensors, all of one shape, in order on rank 0; empty on the others. Raises RankLost."""
        ...

    def barrier(self) -> None:
        """Order device work: work that ranks launched before this call precedes work launched after it. Raises
        RankLost.
        """
        ...


class SoloGroup:
    """Implements ParallelGroup for a model on one rank."""

    rank = 0
    size = 1

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is the sum already."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def barrier(self) -> None:
        """Do nothing: there are no other ranks."""
