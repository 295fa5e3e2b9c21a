"""How much of a GPU's memory one worker may take: its share of 80 %, or what `engine.memory_bytes` says.

The share is of the GPU's whole memory and not of what is free at the moment: workers that start together see each
other's weights arrive, in no order, and each must come to the same figure. What a share lacks is an error.
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
"""For a process that has just ended: the driver gives its memory back a little later."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Of one GPU, as it is now."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWish:
    """What one rank is to have of its GPU."""

    index: int
    """Number of the GPU, by the numbering of the process that started the worker."""
    sharers: int = 1
    """Workers on it."""
    stated_bytes: int | None = None
    """Of each, in place of its share."""

    def limit_bytes(self, memory: GpuMemory) -> int:
        """What the rank may take. Raises ConfigError when so much can never be there for each of them."""
        if self.stated_bytes is None:
            return default_limit_bytes(memory.total_bytes, self.sharers)
        if self.stated_bytes * self.sharers > memory.total_bytes:
            raise ConfigError(
                f"{self._named(memory)}: engine.memory_bytes wants {_gib(self.stated_bytes)} for each of "
                f"{self.sharers} workers there; it has {_gib(memory.total_bytes)}. {_REMEDY}"
            )
        return self.stated_bytes

    def shortage(self, memory: GpuMemory) -> str | None:
        """Why the rank cannot have that now; None: it can."""
        wanted = self.limit_bytes(memory)
        if wanted <= memory.free_bytes:
            return None
        why = f"80 % of it, divided by {self.sharers}" if self.sharers > 1 else "80 % of it"
        why = why if self.stated_bytes is None else "engine.memory_bytes"
        return (
            f"{self._named(memory)}: this worker wants {_gib(wanted)} ({why}); {_gib(memory.free_bytes)} of "
            f"{_gib(memory.total_bytes)} are free. {_REMEDY}"
        )

    def summary(self, memory: GpuMemory) -> str:
        """One line for the log: how the GPU's memory is divided."""
        shared = f", as does each of {self.sharers} workers" if self.sharers > 1 else ""
        return (
            f"{self._named(memory)}: takes up to {_gib(self.limit_bytes(memory))} of {_gib(memory.total_bytes)}{shared}"
        )

    def _named(self, memory: GpuMemory) -> str:
        return f"GPU {self.index} ({memory.name})"


_REMEDY = "Free some, state a smaller engine.memory_bytes, or other GPUs: prefill.gpus, decode.gpus"


def granted_bytes(
    wish: GpuWish, read: Callable[[], GpuMemory], *, patience_s: float = PATIENCE_S, wait: Callable[[float], object]
) -> int:
    """What the rank may take of its GPU, as soon as it is free there. Raises ConfigError when it does not get free."""
    left_s = patience_s
    while (shortage := wish.shortage(read())) is not None:
        if left_s <= 0:
            raise ConfigError(shortage)
        wait(_LOOK_S)
        left_s -= _LOOK_S
    return wish.limit_bytes(read())


def gpu_limit_bytes(wish: GpuWish, device: torch.device) -> int:
    """The same, of a device of this process; says so in the log."""
    found = granted_bytes(wish, lambda: read_gpu(device), wait=time.sleep)
    _log.info("%s", wish.summary(read_gpu(device)))
    return found


def read_gpu(device: torch.device) -> GpuMemory:
    """What CUDA says of it."""
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(name=torch.cuda.get_device_name(device), free_bytes=free, total_bytes=total)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
