"""Result buffers that live as long as the engine: a step in the steady state allocates nothing."""

import torch
from torch import Tensor


class Buffers:
    """Tensors by name, each as large as the largest step so far asked for."""

    __slots__ = ("_device", "_tensors")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype, *, padding: int = 0) -> Tensor:
        """Uninitialised `[num_rows, num_columns]`, rows `padding` elements apart; valid until the next with this name.

        Names are used with one width and dtype each: everything that shares a name shares its memory.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape[0] < num_rows:
            tensor = torch.empty((num_rows, num_columns + padding), dtype=dtype, device=self._device)[:, :num_columns]
            self._tensors[name] = tensor
        return tensor[:num_rows] if tensor.shape[0] > num_rows else tensor
