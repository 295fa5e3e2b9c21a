"""Result buffers that live as long as the engine: a step in the steady state allocates nothing."""

import torch
from torch import Tensor


class Buffers:
    """Tensors by name, each as large as the largest step so far has needed."""

    __slots__ = ("_device", "_tensors", "generation")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self.generation = 0
        """Incremented whenever a buffer is moved or freed."""

    def clear(self) -> None:
        """Free all buffers."""
        self._tensors.clear()
        self.generation += 1

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype, *, padding: int = 0) -> Tensor:
        """Return an uninitialised `[num_rows, num_columns]`, valid until the next call with this name.

        `padding`: elements between the end of a row and the beginning of the next. A name must always be used with the
        same width and dtype; all its tensors share one memory.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape[0] < num_rows:
            room = _with_room(num_rows)
            tensor = torch.empty((room, num_columns + padding), dtype=dtype, device=self._device)[:, :num_columns]
            self._tensors[name] = tensor
            self.generation += 1
        return tensor[:num_rows] if tensor.shape[0] > num_rows else tensor


def _with_room(num_rows: int) -> int:
    """Round up by at most a quarter: a few more rows, step after step, then move no buffer."""
    grain = 1 << max(0, num_rows.bit_length() - 3)
    return -(-num_rows // grain) * grain
