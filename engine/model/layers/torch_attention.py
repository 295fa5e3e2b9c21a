"""Paged attention in plain torch: the reference, for any device.

Single-row sequences are computed together: their blocks are gathered into a padded batch for one
scaled-dot-product call, split into groups so that neither padding nor the gathered copy grows without bound.
Each longer chunk is one call of its own (tiled when its mask would be too large); a chunk that starts its
sequence attends directly to its own rows. Gather indices and masks are made once per step.

A gather in the order (k/v, sequence, head, block) yields keys and values ready for the call. A cache in eight bits
is decoded while gathering; a chunk's own rows are encoded and decoded too, so that all rows attend to the same values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.model.layers.kv_pages import pages_of, plane_index, slot_index
from engine.model.layers.rope import rotate_
from engine.model.memory_budget import MAX_GATHER_BYTES, MAX_MASK_ELEMENTS
from engine.types.step_inputs import IntArray, StepInputs

_MIN_SPLIT_BLOCKS = 64
"""Padding, in blocks, below which splitting a group costs more than it saves."""

_TILE_ELEMENTS = 2**20
"""Elements of one tile's mask, for a chunk whose whole mask is too large to keep."""


@dataclass(frozen=True, slots=True)
class _SingleGroup:
    """Consecutive single-row sequences that share one gather."""

    begin: int
    end: int
    index: Tensor  # [2 * num_seqs * num_kv_heads * num_blocks]
    mask: Tensor  # [num_seqs, 1, 1, num_blocks * block_size], added to scores


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive rows of one sequence."""

    begin: int
    end: int
    start: int
    """Position of the first row."""
    first_key: int
    """Position of the first key that the chunk attends to."""
    num_keys: int
    window: int | None
    index: Tensor | None  # [2 * num_kv_heads * num_blocks]; None: only the chunk's own rows are attended to
    mask: Tensor | None  # [num_rows, num_keys]; None: plainly causal, or too large to keep
    causal: bool
    tile: int
    """Rows per call."""


class TorchAttention:
    """Backend for any device that torch runs on."""

    def __init__(self, spec: AttentionSpec, cache: PagedKVCache, *, max_gather_bytes: int = MAX_GATHER_BYTES) -> None:
        config = spec.config
        self.spec = spec
        self.config = config
        self.cache = cache
        self.device = cache.tensor.device
        self.dtype = spec.dtype
        self.pages = pages_of(cache, spec)
        self.max_group_blocks = max(1, max_gather_bytes // self.pages.gathered_bytes)
        self.layer_windows = config.layer_windows
        self.windows = tuple(dict.fromkeys(self.layer_windows))
        self.hidden_score = float(torch.finfo(self.dtype).min) / 2

    def plan(self, inputs: StepInputs) -> "TorchAttentionPlan":
        """Build a step's indices and masks, once for every distinct window."""
        return TorchAttentionPlan(self, inputs)

    def gather_index(self, tables: IntArray) -> Tensor:
        """Planes to gather for `[num_seqs, num_blocks]` tables, in the order (k/v, sequence, head, block)."""
        return self.to_device(plane_index(tables, self.config.num_kv_heads))

    def mask(self, chunk: _Chunk, begin: int, end: int) -> Tensor:
        """Mask to add to the scores of a chunk's rows `begin..end`: `[end - begin, num_keys]`."""
        row = torch.arange(begin, end, device=self.device)[:, None] + (chunk.start - chunk.begin)
        key = torch.arange(chunk.num_keys, device=self.device) + chunk.first_key
        hidden = key > row
        if chunk.window is not None:
            hidden |= key <= row - chunk.window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, self.hidden_score)

    def attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Attend `[..., num_rows, head_dim]` to `[..., num_keys, head_dim]`; `mask` is added to scores.

        `is_causal`: row i sees keys up to i, in place of a mask.
        """
        layer = self.config.layers[0]
        if layer.soft_cap is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=layer.scale
            )
        scores = (queries @ keys.transpose(-1, -2)).float() * (layer.score_scale / layer.soft_cap)
        scores = scores.tanh_().mul_(layer.soft_cap)
        if is_causal:
            mask = torch.full(scores.shape[-2:], self.hidden_score, device=scores.device).triu_(1)
        if mask is not None:
            scores += mask
        return scores.softmax(-1).to(values.dtype) @ values

    def to_device(self, array: IntArray) -> Tensor:
        """Copy a host array to the cache's device."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


class TorchAttentionPlan:
    """One step's attention in plain torch."""

    def __init__(self, backend: TorchAttention, inputs: StepInputs) -> None:
        self._backend = backend
        self._inputs = inputs
        index = slot_index(inputs.slots, backend.config.num_kv_heads, backend.cache.block_size)
        self._write_index = backend.to_device(index)
        positions = backend.to_device(inputs.positions)
        self._angles = tuple(rope.angles(positions, backend.dtype) for rope in backend.spec.ropes)
        self.singles = {w: tuple(self._single_groups(w)) for w in backend.windows}
        self.chunks = {w: tuple(self._chunks_of(w)) for w in backend.windows}

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        backend, config = self._backend, self._backend.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, config.head_dim)
        queries = qkv[:, : config.num_heads]
        if backend.spec.head_norms is not None:
            backend.spec.head_norms[layer].apply_(queries, qkv[:, config.num_heads : num_rotated])
        rotate_(qkv[:, :num_rotated], *self._angles[backend.spec.rope_of_layer[layer]])
        fresh = qkv[:, config.num_heads :].view(qkv.shape[0], 2, config.num_kv_heads, -1)
        # A slot is also read, with weight zero, by sequences that do not own it: see PagedKVCache.
        fresh.nan_to_num_(0.0, 0.0, 0.0)
        fresh = backend.pages.write(layer, self._write_index, fresh)
        window = backend.layer_windows[layer]
        singles, chunks = self.singles[window], self.chunks[window]
        if len(singles) == 1 and not chunks:
            return self._attend_singles(layer, singles[0], queries)
        out = qkv.new_empty(qkv.shape[0], config.num_heads * config.head_dim)
        for group in singles:
            out[group.begin : group.end] = self._attend_singles(layer, group, queries[group.begin : group.end])
        for chunk in chunks:
            self._attend_chunk(layer, chunk, queries, fresh, out)
        return out

    def _attend_singles(self, layer: int, group: _SingleGroup, queries: Tensor) -> Tensor:
        config = self._backend.config
        num_seqs = group.end - group.begin
        gathered = self._backend.pages.gather(layer, group.index)
        keys, values = gathered.view(2, num_seqs, config.num_kv_heads, -1, config.head_dim)
        # The query heads of one key-value head are rows of one call, so that keys are read once for all of them.
        grouped = queries.reshape(num_seqs, config.num_kv_heads, config.group_size, config.head_dim)
        out = self._backend.attention(grouped, keys, values, group.mask)
        return out.reshape(num_seqs, -1)

    def _attend_chunk(self, layer: int, chunk: _Chunk, queries: Tensor, fresh: Tensor, out: Tensor) -> None:
        config = self._backend.config
        if chunk.index is None:
            keys, values = fresh[chunk.begin : chunk.end].permute(1, 2, 0, 3)
        else:
            gathered = self._backend.pages.gather(layer, chunk.index)
            gathered = gathered.view(2, config.num_kv_heads, -1, config.head_dim)
            keys, values = gathered[:, :, : chunk.num_keys]  # each [num_kv_heads, num_keys, head_dim]
        spread = (-1, config.group_size, -1, -1)
        keys, values = keys.unsqueeze(1).expand(spread), values.unsqueeze(1).expand(spread)
        for begin in range(chunk.begin, chunk.end, chunk.tile):
            end = min(begin + chunk.tile, chunk.end)
            mask = chunk.mask
            if mask is None and not chunk.causal:
                mask = self._backend.mask(chunk, begin, end)
            rows = queries[begin:end].view(end - begin, config.num_kv_heads, config.group_size, -1)
            attended = self._backend.attention(rows.permute(1, 2, 0, 3), keys, values, mask, is_causal=chunk.causal)
            # [num_kv_heads, group_size, num_rows, head_dim]
            out[begin:end] = attended.permute(2, 0, 1, 3).reshape(end - begin, -1)

    def _single_groups(self, window: int | None) -> Iterator[_SingleGroup]:
        inputs, size = self._inputs, self._inputs.block_size
        if not inputs.num_single:
            return
        position = inputs.starts[: inputs.num_single]
        lowest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        first = lowest // size
        needed = position // size + 1 - first
        for begin, end in _split(needed.tolist(), self._backend.max_group_blocks):
            columns = first[begin:end, None] + np.arange(needed[begin:end].max())
            inside = np.minimum(columns, inputs.tables.shape[1] - 1)
            tables = np.take_along_axis(inputs.tables[begin:end], inside, axis=1)
            keys = (columns[:, :, None] * size + np.arange(size)).reshape(end - begin, -1)
            hidden = (keys > position[begin:end, None]) | (keys < lowest[begin:end, None])
            mask = np.where(hidden, np.float32(self._backend.hidden_score), np.float32(0.0))
            yield _SingleGroup(
                begin=begin,
                end=end,
                index=self._backend.gather_index(tables),
                mask=torch.from_numpy(mask).to(self._backend.device, self._backend.dtype)[:, None, None, :],
            )

    def _chunks_of(self, window: int | None) -> Iterator[_Chunk]:
        inputs = self._inputs
        begin = inputs.num_single
        kept = 0
        for i in range(inputs.num_single, len(inputs.starts)):
            chunk = self._chunk(i, begin, window)
            size = (chunk.end - chunk.begin) * chunk.num_keys
            if not chunk.causal and kept + size <= MAX_MASK_ELEMENTS // len(self._backend.windows):
                kept += size
                chunk = replace(chunk, mask=self._backend.mask(chunk, chunk.begin, chunk.end))
            begin = chunk.end
            yield chunk

    def _chunk(self, sequence: int, begin: int, window: int | None) -> _Chunk:
        inputs, size = self._inputs, self._inputs.block_size
        start, count = int(inputs.starts[sequence]), int(inputs.counts[sequence])
        first_block = 0 if window is None else max(0, start - window + 1) // size
        num_keys = start + count - first_block * size
        causal = start == 0 and (window is None or window >= count)
        fits = causal or count * num_keys <= MAX_MASK_ELEMENTS // len(self._backend.windows)
        table = inputs.tables[None, sequence, first_block : -(-(start + count) // size)]
        return _Chunk(
            begin=begin,
            end=begin + count,
            start=start,
            first_key=first_block * size,
            num_keys=num_keys,
            window=window,
            index=self._backend.gather_index(table) if start else None,
            mask=None,
            causal=causal,
            tile=count if fits else max(1, _TILE_ELEMENTS // num_keys),
        )


def _split(needed: list[int], max_blocks: int) -> Iterator[tuple[int, int]]:
    """Cut sequences that need `needed` blocks each into runs, each padded to a common width."""
    begin, widest = 0, needed[0]
    for i in range(1, len(needed)):
        too_large = max(widest, needed[i]) * (i + 1 - begin) > max_blocks
        padding = (widest - needed[i]) * (len(needed) - i)
        if too_large or (needed[i] * 2 < widest and padding > _MIN_SPLIT_BLOCKS):
            yield begin, i
            begin, widest = i, needed[i]
        widest = max(widest, needed[i])
    yield begin, len(needed)
