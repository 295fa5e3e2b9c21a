"""Host memory through which a step's arrays reach the device: written once, copied without anybody waiting.

Two pieces take turns, so that a step can be laid out while the copies of the one before are still being made. A piece
is written again only when the device is past the step that used it last. In the steady state nothing is allocated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runner.device_queue import DeviceQueue, Mark

_DEPTH = 2
_ALIGNMENT = 64
_SMALLEST = 1 << 16


class _Piece:
    """One step's memory."""

    __slots__ = ("done", "memory", "outgrown", "used")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8
        self.used = 0
        self.done: Mark | None = None
        self.outgrown: list[Tensor] = []
        """Pieces that were too small, in which copies may still be under way."""


class Staging:
    """Used by one thread. `put` only within `step`."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._pieces = [_Piece(queue.host_memory(_SMALLEST)) for _ in range(_DEPTH)]
        self._turn = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step's uploads; waits for the device only where it is more than a step behind."""
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

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, for work asked for from now on; the array itself may change at once."""
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
