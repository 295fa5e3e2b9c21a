"""A worker's share of a GPU's memory: 80 % divided by the GPU's workers, or `engine.memory_bytes`.

The share is of the GPU's whole memory and not of its free memory: workers that start together load their weights
in any order, and each must get the same share. It is an error when the share is not free.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model.memory_budget import default_limit_bytes
from tandem.errors import ConfigError

_log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Time to wait for memory of a process that has just ended: the driver frees it a little later."""
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Memory of one GPU at this moment."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryRequest:
    """Memory that one rank asks of its GPU."""

    index: int
    """Number of the GPU, by the numbering of the process that started the worker."""
    sharers: int = 1
    """Number of workers that share it."""
    configured_bytes: int | None = None
    """Memory limit of each worker's rank, if configured; None: its share."""

    def limit_bytes(self, memory: GpuMemory) -> int:
        """Memory limit of the rank. Raises ConfigError when the GPU is too small for all its workers' limits."""
        if self.configured_bytes is None:
            return default_limit_bytes(memory.total_bytes, self.sharers)
        if self.configured_bytes * self.sharers > memory.total_bytes:
            raise ConfigError(
                f"{self._label(memory)}: engine.memory_bytes wants {_gib(self.configured_bytes)} for each of "
                f"{self.sharers} workers there; it has {_gib(memory.total_bytes)}. {_REMEDY}"
            )
        return self.configured_bytes

    def shortage(self, memory: GpuMemory) -> str | None:
        """Reason for which the rank's memory is not free now; None when it is."""
        wanted = self.limit_bytes(memory)
        if wanted <= memory.free_bytes:
            return None
        why = f"80 % of it, divided by {self.sharers}" if self.sharers > 1 else "80 % of it"
        why = why if self.configured_bytes is None else "engine.memory_bytes"
        return (
            f"{self._label(memory)}: this worker wants {_gib(wanted)} ({why}); {_gib(memory.free_bytes)} of "
            f"{_gib(memory.total_bytes)} are free. {_REMEDY}"
        )

    def summary(self, memory: GpuMemory) -> str:
        """One line for the log: how the GPU's memory is divided."""
        shared = f", as does each of {self.sharers} workers" if self.sharers > 1 else ""
        return (
            f"{self._label(memory)}: takes up to {_gib(self.limit_bytes(memory))} of {_gib(memory.total_bytes)}{shared}"
        )

    def _label(self, memory: GpuMemory) -> str:
        return f"GPU {self.index} ({memory.name})"


_REMEDY = "Free some, state a smaller engine.memory_bytes, or other GPUs: prefill.gpus, decode.gpus"


def granted_bytes(
    request: GpuMemoryRequest,
    read: Callable[[], GpuMemory],
    *,
    patience_s: float = PATIENCE_S,
    wait: Callable[[float], object],
) -> int:
    """Wait until the rank's memory is free. Returns its limit in bytes. Raises ConfigError after `patience_s`."""
    left_s = patience_s
    while (shortage := request.shortage(read())) is not None:
        if left_s <= 0:
            raise ConfigError(shortage)
        wait(_POLL_S)
        left_s -= _POLL_S
    return request.limit_bytes(read())


def gpu_limit_bytes(request: GpuMemoryRequest, device: torch.device) -> int:
    """Do the same for a device of this process, and log the result."""
    found = granted_bytes(request, lambda: read_gpu(device), wait=time.sleep)
    _log.info("%s", request.summary(read_gpu(device)))
    return found


def read_gpu(device: torch.device) -> GpuMemory:
    """Read a GPU's memory from CUDA."""
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(name=torch.cuda.get_device_name(device), free_bytes=free, total_bytes=total)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
