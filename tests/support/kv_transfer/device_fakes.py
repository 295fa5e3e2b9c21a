"""A device that is not there: pools that claim to be on one, over memory of this host, lent through its descriptor.

What is real: packing, summing and unpacking by torch, the claims, the two processes. What is not: streams, CUDA's
handles and a GPU's rates; tandem_bench/gpu_suite.py has those.
"""

import json
import mmap
import os

import torch

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.transports.cuda_ipc.device_sharing import CudaSharing


def on_device(region: KVRegion) -> KVRegion:
    """The same blocks, as if a device held them."""
    return KVRegion.on_device(TorchPool(torch.frombuffer(region.buffer, dtype=torch.uint8), region.layout))


class HostSharing(CudaSharing):
    """Lends the memory behind a SharedPool."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def problem(self, region: KVRegion) -> str | None:
        return None if region.device is not None else super().problem(region)

    def lend(self, memory: torch.Tensor) -> bytes:
        return json.dumps([os.getpid(), self._fd, memory.numel()]).encode()

    def borrow(self, token: bytes) -> torch.Tensor:
        pid, fd, size = json.loads(token)
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(opened, size), dtype=torch.uint8)
        finally:
            os.close(opened)
