"""Access of plain torch to the paged cache, in the model's dtype or in codes.

Both number rows alike: a gather names planes, `block * 2 * num_kv_heads + plane`, where the planes of a block
are the heads of K, then those of V; a write names slots within them, `plane's number * block_size + offset`.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kv_storage.kv_codes import group_codes, head_codes, restored, token_codes
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import IntArray


class KVPages(Protocol):
    """All layers' keys and values."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes that gathering one block takes."""
        ...

    def write(self, layer: int, index: Tensor, fresh: Tensor) -> Tensor:
        """Store finite `[num_rows, 2, num_kv_heads, head_dim]` in their slots. Returns them as a later read will."""
        ...

    def gather(self, layer: int, index: Tensor) -> Tensor:
        """Read planes by number: `[num_planes, block_size * head_dim]` in the model's dtype."""
        ...


class PlainPages:
    """Pages in the model's own dtype: `[num_blocks * 2 * num_kv_heads, block_size * head_dim]`, gathered in one
    copy.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        layout = cache.layout
        row = layout.block_size * layout.head_dim
        self._planes = tuple(cache.layer(i).view(-1, row) for i in range(layout.num_layers))
        self._slots = tuple(planes.view(-1, layout.head_dim) for planes in self._planes)
        self.gathered_bytes = layout.layer_block_bytes

    def write(self, layer: int, index: Tensor, fresh: Tensor) -> Tensor:
        self._slots[layer].index_copy_(0, index, fresh.reshape(-1, fresh.shape[-1]))
        return fresh

    def gather(self, layer: int, index: Tensor) -> Tensor:
        return self._planes[layer].index_select(0, index)


class CodePages:
    """Pages in int8 or int4 with scales beside the codes, or in fp8_e4m3 with the model's scales."""

    def __init__(self, cache: PagedKVCache, dtype: torch.dtype, head_scales: Tensor | None) -> None:
        """`head_scales`: float32 `[num_layers, 2, num_kv_heads]`, for fp8_e4m3; None: 1."""
        layout = cache.layout
        layers = range(layout.num_layers)
        self._dtype = dtype
        self._num_planes = 2 * layout.num_local_kv_heads
        self._block_size = layout.block_size
        self._codes = tuple(cache.layer(i).flatten(1, 2) for i in layers)  # [num_blocks, planes, block_size, ...]
        scales = [cache.layer_scales(i) for i in layers]
        self._token_scales = tuple(s.flatten(1, 2) for s in scales if s is not None)  # likewise
        if head_scales is None:
            head_scales = torch.ones(layout.num_layers, self._num_planes, device=cache.tensor.device)
        self._head_scales = head_scales.view(layout.num_layers, self._num_planes)
        self._encode = group_codes if layout.dtype == "int4" else token_codes
        per_block = self._num_planes * layout.block_size * layout.head_dim
        codes = 2 if layout.dtype == "int4" else 1  # packed and unpacked
        self.gathered_bytes = per_block * (codes + torch.float32.itemsize + dtype.itemsize)

    def write(self, layer: int, index: Tensor, fresh: Tensor) -> Tensor:
        rows, offset = index // self._block_size, index % self._block_size
        where = (rows // self._num_planes, rows % self._num_planes, offset)
        if self._token_scales:
            codes, scales = self._encode(fresh)
            self._codes[layer][where] = codes.flatten(0, 2)
            self._token_scales[layer][where] = scales.flatten(0, 2)
        else:
            scales = self._head_scales[layer].view(fresh.shape[1:3])
            codes = head_codes(fresh, scales)
            # As bytes: eight-bit floats have no indexed assignment.
            self._codes[layer].view(torch.uint8)[where] = codes.view(torch.uint8).flatten(0, 2)
        return restored(codes, scales, self._dtype)

    def gather(self, layer: int, index: Tensor) -> Tensor:
        block, plane = index // self._num_planes, index % self._num_planes
        codes = self._codes[layer].view(torch.uint8)[block, plane].view(self._codes[layer].dtype)
        if self._token_scales:
            scales = self._token_scales[layer][block, plane]  # [num_planes, block_size, ...]
        else:
            scales = self._head_scales[layer][plane, None]
        return restored(codes, scales, self._dtype).flatten(1)


def pages_of(cache: PagedKVCache, spec: AttentionSpec) -> KVPages:
    """Make the pages of a cache, by its dtype."""
    if cache.layout.is_quantised:
        return CodePages(cache, spec.dtype, spec.kv_scales)
    return PlainPages(cache)


def plane_index(tables: IntArray, num_kv_heads: int) -> IntArray:
    """Plane numbers of `[num_seqs, num_blocks]` tables, in the order (k/v, sequence, head, block)."""
    planes = np.arange(2 * num_kv_heads, dtype=np.int64).reshape(2, 1, num_kv_heads, 1)
    return (tables[None, :, None, :] * (2 * num_kv_heads) + planes).reshape(-1)


def slot_index(slots: IntArray, num_kv_heads: int, block_size: int) -> IntArray:
    """Slots of a step's tokens within planes, in the order (token, k/v, head)."""
    planes = np.arange(2 * num_kv_heads, dtype=np.int64)
    blocks, offsets = slots // block_size, slots % block_size
    return ((blocks[:, None] * planes.size + planes) * block_size + offsets[:, None]).reshape(-1)
