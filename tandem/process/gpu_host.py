"""Finds this host's NVIDIA GPUs and puts a worker's own first in `CUDA_VISIBLE_DEVICES`.

CUDA numbers a process's devices by `CUDA_VISIBLE_DEVICES`, read once, before its first call. A worker puts its own GPUs
in front there and leaves the others behind them: kernels, graphs and libraries that use "the" device then use its own,
and memory of its peers' GPUs can still be mapped (cuda_ipc), which a process that sees only its own GPU cannot do.
"""

import ctypes
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


class GpuHost(Protocol):
    """Source of information about a host's GPUs."""

    def names(self) -> tuple[str, ...]:
        """Names of the GPUs that this process may use, in the order of their indices."""
        ...

    def put_first(self, gpus: Sequence[int]) -> None:
        """Put these GPUs first, in this order, before all others. Call it before the first use of CUDA."""
        ...


class NvidiaHost:
    """Queries NVML, which touches no GPU and takes no memory there."""

    def __init__(self, environ: MutableMapping[str, str], uuids: Callable[[], tuple[str, ...]] | None = None) -> None:
        """`environ`: this process's. `uuids`: all GPUs of the host, in the driver's order."""
        self._environ = environ
        self._uuids = uuids or driver_uuids

    def names(self) -> tuple[str, ...]:
        stated, found = self._environ.get(VISIBLE), self._uuids()
        return found if stated is None else _as_cuda_reads(stated, len(found))

    @property
    def is_ordered(self) -> bool:
        """Whether somebody has said which GPUs this process may use, and in which order."""
        return VISIBLE in self._environ

    def put_first(self, gpus: Sequence[int]) -> None:
        names = self.names()
        order = [*gpus, *(index for index in range(len(names)) if index not in gpus)]
        # By default CUDA would begin with the fastest GPU, while the driver begins with the first on the bus.
        if order != sorted(order) or (VISIBLE not in self._environ and len(names) > 1):
            self._environ[VISIBLE] = ",".join(names[index] for index in order)


def _as_cuda_reads(stated: str, num_gpus: int) -> tuple[str, ...]:
    """Parse a `CUDA_VISIBLE_DEVICES`; CUDA stops at the first unknown device."""
    names: list[str] = []
    for part in stated.split(","):
        name = part.strip()
        if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < num_gpus):
            break
        names.append(name)
    return tuple(names) if num_gpus else ()


def driver_uuids() -> tuple[str, ...]:
    """Names of this machine's GPUs in PCI bus order; none without NVIDIA's driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    with suppress(OSError, AttributeError):
        if nvml.nvmlInit_v2() == 0:
            try:
                return _listed(nvml)
            finally:
                nvml.nvmlShutdown()
    return ()


def _listed(nvml: Any) -> tuple[str, ...]:
    count, names = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            return ()
        if nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES)) != 0:
            return ()
        names.append(uuid.value.decode("ascii", "replace"))
    return tuple(names)
