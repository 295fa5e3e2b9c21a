"""What layers ask of the ranks that share a model: sums, and rows brought together."""

from typing import Protocol

from torch import Tensor


class ParallelGroup(Protocol):
    """The ranks of one tensor-parallel model, each its own process. Every rank makes the same calls in one order."""

    @property
    def rank(self) -> int:
        """Of this process; 0 schedules and samples."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, the same bits everywhere. Raises RankLost."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 every rank's tensor, all of one shape, in order; on the others nothing. Raises RankLost."""
        ...

    def meet(self) -> None:
        """Order device work: what ranks launched before this call precedes what they launch after. Raises RankLost."""
        ...


class SoloGroup:
    """A model on one rank."""

    rank = 0
    size = 1

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """The sum of one."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def meet(self) -> None:
        """Nobody is waited for."""
