"""The memory of the KV blocks: one contiguous tensor, perhaps laid on memory that a transport also maps.

Shape `[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]`: one block of one layer is contiguous,
and in it one head of K or of V is contiguous. Which block belongs to whom is `engine.blocks`' business.
"""

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.kv_layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKVCache:
    """All KV blocks of one worker, zeroed at construction.

    Zeroing is not for tidiness: attention reads, with weight zero, slots that nobody has written, and zero times
    NaN is NaN. It also touches every page, so that transfers into the pool never fault.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        device: torch.device | str = "cpu",
        buffer: memoryview | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._buffer = buffer
        shape = (
            layout.num_layers,
            num_blocks,
            2,
            layout.num_local_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        dtype = TORCH_DTYPES[layout.dtype]
        if buffer is None:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.tensor = _on_buffer(buffer, num_blocks * layout.block_bytes, torch.device(device))
            self.tensor = self.tensor.view(dtype).view(shape)
        self._layers = tuple(self.tensor.unbind(0))

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.block_size

    def layer(self, index: int) -> Tensor:
        """One layer's blocks, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
        return self._layers[index]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks over all layers; int64 `[num_copies]` each, no target among the sources."""
        self.tensor[:, targets] = self.tensor[:, sources]

    def host_view(self) -> memoryview | None:
        """The pool's bytes, writable, without a copy; None when they are not in host memory."""
        if self.tensor.device.type != "cpu":
            return None
        if self._buffer is not None:
            return self._buffer.cast("B")[: self.size_bytes]
        return self.tensor.view(-1).view(torch.uint8).numpy().data


def _on_buffer(buffer: memoryview, size_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        raise ConfigError("a KV pool on shared memory must be on the CPU")
    if buffer.readonly or buffer.nbytes < size_bytes:
        raise ConfigError(f"KV pool memory must be writable and hold {size_bytes} bytes, has {buffer.nbytes}")
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes).zero_()
