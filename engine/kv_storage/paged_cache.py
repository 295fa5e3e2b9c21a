"""The memory of the KV blocks: one contiguous tensor, perhaps laid on memory that a transport also maps.

Shape `[num_planes, num_blocks, 2, num_kv_heads, block_size, head_dim]`, where a plane is a layer of a block's group
(tandem/values/kv_layout.py: all layers, unless windowed ones are kept apart): one block of one layer is contiguous, and
in it one head of K or of V is contiguous. In int4 the last dimension is of bytes, two values in each. In int8 and
int4 the scales of its tokens follow (tandem/values/kv_layout.py), so one block of one layer is one run of bytes in
every dtype. `engine.kv_cache.pool` knows which blocks are in use.
"""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.values.kv_layout import KVLayout, code_bytes, scale_bytes

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that a model may compute in, by name."""

CACHE_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "int4": torch.uint8}
"""Dtypes that a cache may store, by name."""

_SCALE_DTYPES = {"int8": torch.float32, "int4": torch.bfloat16}


class PagedKVCache:
    """All KV blocks of one rank, zeroed at construction.

    Zeroing is necessary: attention reads slots that were never written, with weight zero, and zero times NaN is NaN.
    It also touches every page, so that transfers into the pool never fault.
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
        dtype = CACHE_DTYPES[layout.dtype]
        if buffer is None:
            self._bytes = torch.zeros(self.size_bytes, dtype=torch.uint8, device=device)
        else:
            self._bytes = _on_buffer(buffer, self.size_bytes, torch.device(device))
        heads = (2, layout.num_local_kv_heads, layout.block_size)
        self.tensor = self._blocks_of(dtype, (*heads, code_bytes(layout.dtype, layout.head_dim) // dtype.itemsize), 0)
        self._planes = self.tensor.unbind(0)
        self._scales: tuple[Tensor, ...] = ()
        if layout.scale_offset is not None:
            groups = () if layout.dtype == "int8" else (scale_bytes(layout.dtype, layout.head_dim) // 4, 2)
            kept = _SCALE_DTYPES[layout.dtype]
            self._scales = self._blocks_of(kept, (*heads, *groups), layout.scale_offset).unbind(0)
        self.blocks = self._bytes.view(layout.planes_per_rank, num_blocks, -1)
        """All bytes of every plane's blocks, scales included: uint8 `[num_planes, num_blocks, layer_block_bytes]`."""
        word = torch.int64 if layout.layer_block_bytes % torch.int64.itemsize == 0 else torch.uint8
        self._words = self.blocks.view(word)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self.layout.block_size

    def group(self, index: int) -> "PagedKVCache":
        """The same memory as a cache of one group's layers, numbered from 0."""
        group = self.layout.groups[index]
        view = copy(self)
        view.layout = replace(self.layout, num_layers=len(group), windowed_layers=(), window=0)
        return view

    def layer(self, index: int) -> Tensor:
        """One plane: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, contiguous unless scales follow blocks."""
        return self._planes[index]

    def layer_scales(self, index: int) -> Tensor | None:
        """Scales of one plane's tokens, `[num_blocks, 2, num_kv_heads, block_size]`: in int8 float32, in int4 bfloat16
        with two more dimensions, `[num_groups, 2]`; None without any.
        """
        return self._scales[index] if self._scales else None

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether a model that computes in `dtype` can keep its keys and values here."""
        return self.layout.is_quantised or self.tensor.dtype is dtype

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks over all planes; int64 `[num_copies]` each, no target among the sources."""
        self._words[:, targets] = self._words[:, sources]

    def host_view(self) -> memoryview | None:
        """The pool's bytes, writable, without a copy; None when they are not in host memory."""
        if self._bytes.device.type != "cpu":
            return None
        return self._bytes.numpy().data

    def _blocks_of(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """The part of every block that begins at byte `offset`: `[num_planes, num_blocks, *shape]`."""
        inner = [1]
        for size in shape[:0:-1]:
            inner.insert(0, inner[0] * size)
        block = self.layout.layer_block_bytes // dtype.itemsize
        return self._bytes.view(dtype).as_strided(
            (self.layout.planes_per_rank, self.num_blocks, *shape),
            (self.num_blocks * block, block, *inner),
            offset // dtype.itemsize,
        )


def _on_buffer(buffer: memoryview, size_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        raise ConfigError("a KV pool on shared memory must be on the CPU")
    if buffer.readonly or buffer.nbytes < size_bytes:
        raise ConfigError(f"KV pool memory must be writable and hold {size_bytes} bytes, has {buffer.nbytes}")
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes).zero_()
