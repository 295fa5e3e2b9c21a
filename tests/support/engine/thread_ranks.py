"""The ranks of a group as threads of one process: over gloo, or without any library for sums."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from engine.distributed.torch_group import TorchGroup

T = TypeVar("T")
TIMEOUT_S = 30.0


def run_ranks(size: int, work: Callable[[TorchGroup], T], *, fixed_order: bool = False) -> list[T]:
    """What `work` returns on each rank, in order; the first exception if there is one."""
    store_fd = os.memfd_create("test-ranks")

    def run(rank: int, fd: int) -> T:
        group = TorchGroup(
            fd, rank=rank, size=size, device=torch.device("cpu"), timeout_s=TIMEOUT_S, fixed_order=fixed_order
        )
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        started = [threads.submit(run, rank, os.dup(store_fd)) for rank in range(size)]
        os.close(store_fd)
        return [future.result() for future in started]


class ThreadRanks:
    """Implements ParallelGroup for ranks that are threads of one process."""

    def __init__(self, rank: int, shared: list[Tensor | None], meeting: Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared = shared
        self._meeting = meeting

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        parts = self._exchange(tensor)
        return tensor.copy_(sum(parts[1:], start=parts[0]))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = self._exchange(tensor)
        return parts if self.rank == 0 else []

    def barrier(self) -> None:
        self._meeting.wait()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._shared[self.rank] = tensor.clone()
        self._meeting.wait(timeout=60.0)
        parts = [part for part in self._shared if part is not None]
        self._meeting.wait(timeout=60.0)
        return parts
