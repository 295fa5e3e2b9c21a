"""The ranks of a group as threads of one process: gloo is real, only the processes are missing."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

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
