"""Asynchronous copies between the host and its device, and marks to wait for.

A device executes its queue in order, while the host goes on. So memory that it still reads must not be
written, and a result is there only once its mark has been passed. On a CPU all work is done when the
call returns; the same code runs there, and every mark has been passed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class QueueMark(Protocol):
    """A point in a device's queue of work."""

    def wait(self) -> None:
        """Wait until the device has passed the mark."""
        ...

    def has_passed(self) -> bool:
        """Whether the device has passed the mark."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Download:
    """A tensor on its way to the host."""

    _target: Tensor
    _done: QueueMark
    _source: Tensor = field(repr=False)
    """Keeps the memory from being reused while it is being read."""

    def wait(self) -> Tensor:
        """Wait for the copy. Returns the values, in host memory."""
        self._done.wait()
        return self._target

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.has_passed()


class DeviceQueue(Protocol):
    """The work queued on one device by its engine's thread."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate uninitialised uint8 memory that copies can use while the host goes on."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """Copy to the device, for work launched later. `host` must not change until a later mark has been passed."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Copy a tensor to the host after the work launched so far; later work does not wait for the copy."""
        ...

    def mark(self) -> QueueMark:
        """Set a mark after all work launched so far."""
        ...


class _Passed:
    """The mark of a device whose work is done when the call returns."""

    def wait(self) -> None: ...

    def has_passed(self) -> bool:
        return True


class HostQueue:
    """Implements DeviceQueue for a device that is the host."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def download(self, tensor: Tensor) -> Download:
        return Download(tensor, _Passed(), tensor)

    def mark(self) -> QueueMark:
        return _Passed()


class _CudaMark:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def has_passed(self) -> bool:
        return bool(self._event.query())


class CudaQueue:
    """Implements DeviceQueue on the thread's current stream, with a second stream for downloads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._download_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._download_stream):
            here.copy_(tensor, non_blocking=True)
            return Download(here, self.mark(), tensor)

    def mark(self) -> QueueMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)


def device_queue(device: torch.device) -> DeviceQueue:
    """Make the queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


_DEPTH = 2
_ALIGNMENT = 64
_SMALLEST = 1 << 16


class _Piece:
    """Pinned memory of one step, reused once its uploads are done."""

    __slots__ = ("done", "memory", "outgrown", "used")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8
        self.used = 0
        self.done: QueueMark | None = None
        self.outgrown: list[Tensor] = []
        """Earlier, smaller memory of this step, in which copies may still be under way."""


class Staging:
    """Uploads through pinned memory that is reused by later steps. Used by one thread; `upload` only within `step`."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._pieces = [_Piece(queue.host_memory(_SMALLEST)) for _ in range(_DEPTH)]
        self._turn = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Bracket one step's uploads. Waits for the device only where it is more than a step behind."""
        self._turn = (self._turn + 1) % _DEPTH
        piece = self._pieces[self._turn]
        if piece.done is not None:
            piece.done.wait()
        piece.used = 0
        piece.outgrown.clear()
        try:
            yield
        finally:  # copies may be under way even if the step was given up
            piece.done = self._queue.mark()

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device, for work launched from now on. The array may be changed after the call."""
        piece = self._pieces[self._turn]
        end = piece.used + array.nbytes
        if end > len(piece.memory):
            piece.outgrown.append(piece.memory)
            piece.memory = self._queue.host_memory(max(2 * len(piece.memory), array.nbytes))
            piece.used, end = 0, array.nbytes
        host = piece.memory[piece.used : end]
        piece.used = -(-end // _ALIGNMENT) * _ALIGNMENT
        values = host.view(torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype).view(array.shape)
        values.numpy()[...] = array
        return self._queue.upload(values)
