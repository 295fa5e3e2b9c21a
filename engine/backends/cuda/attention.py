"""The Triton attention kernels behind the engine's attention Protocols, and the upload of a step's metadata.

A step's arrays are packed into one piece of pinned memory and copied in one asynchronous transfer. The pinned memory
comes from torch's caching allocator, which reuses it only when the copy is done; so the host may lay out the
next step while the device still reads this one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.triton.flash_decode import DecodeWorkspace, choose_splits, flash_decode
from engine.kernels.triton.paged_prefill import paged_prefill
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.rope_kv import rope_kv
from engine.kernels.triton.tuning import AttentionShape, LaunchTable
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import StepInputs

_CPU_SMS = 8
"""Number of multiprocessors to plan for on a CPU, in Triton's interpreter."""


class DeviceStep(NamedTuple):
    """One step's metadata on the device."""

    slots: Tensor  # int64 [num_rows], negative for padding
    token_ids: Tensor  # int64 [num_rows]
    positions: Tensor  # int32 [num_rows]
    starts: Tensor  # int32 [num_seqs]
    lengths: Tensor  # int32 [num_seqs], 0 for padding
    row_starts: Tensor  # int32 [num_seqs + 1], counted from the first sequence of several rows
    tables: Tensor  # int32 [num_seqs, max_blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Offsets of a step's arrays in one int32 buffer: 64-bit arrays first, for their alignment, tables last."""

    num_rows: int
    num_seqs: int

    @property
    def table_begin(self) -> int:
        """Number of words before the tables."""
        return 5 * self.num_rows + 3 * self.num_seqs + 1

    def views(self, words: Tensor, tables: Tensor) -> DeviceStep:
        """View the arrays in `words`, int32 of at least `table_begin` elements."""
        rows, seqs = self.num_rows, self.num_seqs
        wide, ints = words[: 4 * rows].view(torch.int64), words[5 * rows : self.table_begin]
        return DeviceStep(
            slots=wide[:rows],
            token_ids=wide[rows:],
            positions=words[4 * rows : 5 * rows],
            starts=ints[:seqs],
            lengths=ints[seqs : 2 * seqs],
            row_starts=ints[2 * seqs :],
            tables=tables,
        )

    def pack(self, inputs: StepInputs, words: NDArray[np.int32]) -> None:
        """Fill everything but the tables; unused rows and sequences become padding."""
        rows, seqs = self.num_rows, self.num_seqs
        used, sequences = len(inputs.token_ids), len(inputs.starts)
        words[:] = 0
        wide = words[: 4 * rows].view(np.int64)
        wide[:rows] = -1
        wide[:used] = inputs.slots
        wide[rows : rows + used] = inputs.token_ids
        words[4 * rows : 4 * rows + used] = inputs.positions
        ints = words[5 * rows : self.table_begin]
        ints[:sequences] = inputs.starts
        ints[seqs : seqs + sequences] = inputs.lengths
        ints[2 * seqs] = -inputs.num_single
        ints[2 * seqs + 1 : 2 * seqs + 1 + sequences] = np.cumsum(inputs.counts) - inputs.num_single


def upload(inputs: StepInputs, layout: StepLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a step's arrays to the device in one transfer.

    Returns the packed words, int32 `[table_begin]`, and the tables, int32 `[num_seqs of inputs, max_blocks]`.
    """
    begin, shape = layout.table_begin, inputs.tables.shape
    host = torch.empty(begin + inputs.tables.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = host.numpy()
    layout.pack(inputs, words[:begin])
    words[begin:].reshape(shape)[:] = inputs.tables
    there = host.to(device, non_blocking=True)
    return there[:begin], there[begin:].view(shape)


class CudaAttention:
    """Attention by Triton kernels on one GPU."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: PagedKVCache,
        table: LaunchTable,
        *,
        deterministic: bool = False,
        pdl: bool = False,
    ) -> None:
        """`pdl`: kernels start while the one before ends. Raises ConfigError when `table` has no launch for the
        geometry.
        """
        config = spec.config
        self.spec = spec
        self.device = cache.tensor.device
        self.dtype = spec.dtype
        self.pdl = pdl
        shape = AttentionShape(
            head_dim=config.head_dim, wide=self.dtype is torch.float32, eight_bit=cache.layout.is_quantised
        )
        self.prefill_launch = table.prefill(shape, deterministic=deterministic)
        self.decode_launch = table.decode(shape, deterministic=deterministic)
        self.layers = tuple(_pages(spec, cache, i) for i in range(config.num_layers))
        self._num_sms = _CPU_SMS
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def plan(self, inputs: StepInputs) -> "CudaAttentionPlan":
        layout = StepLayout(num_rows=len(inputs.token_ids), num_seqs=len(inputs.starts))
        step = layout.views(*upload(inputs, layout, self.device))
        longest = int(inputs.lengths[: inputs.num_single].max(initial=0))
        return CudaAttentionPlan(self, step, num_single=inputs.num_single, max_length=longest)

    def workspace(self, batch: int, max_length: int) -> DecodeWorkspace | None:
        """Memory for decoding `batch` sequences of up to `max_length` tokens with split keys; None when they are
        not split.
        """
        config = self.spec.config
        splits = choose_splits(
            batch=max(1, batch),
            num_kv_heads=config.num_kv_heads,
            max_length=max_length,
            num_sms=self._num_sms,
            launch=self.decode_launch,
        )
        if splits == 1:
            return None
        return DecodeWorkspace.allocate(batch, config.num_heads, splits, config.head_dim, self.device)


def _pages(spec: AttentionSpec, cache: PagedKVCache, index: int) -> LayerPages:
    pages = cache.layer(index)
    if pages.dtype is not torch.float8_e4m3fn:
        return LayerPages(pages=pages, token_scales=cache.layer_scales(index))
    if spec.kv_scales is None:
        return LayerPages(pages=pages, head_scales=torch.ones(pages.shape[1:3], device=pages.device))
    return LayerPages(pages=pages, head_scales=spec.kv_scales[index])


class CudaAttentionPlan:
    """One step's attention on the GPU: metadata uploaded once, used by every layer."""

    __slots__ = ("_angles", "_backend", "_num_single", "_step", "_workspace")

    def __init__(self, backend: CudaAttention, step: DeviceStep, *, num_single: int, max_length: int) -> None:
        """`max_length`: at least the length of every sequence with one row."""
        self._backend = backend
        self._step = step
        self._num_single = num_single
        self._angles = tuple(rope.half_angles(step.positions) for rope in backend.spec.ropes)
        self._workspace = backend.workspace(num_single, max_length)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        backend, step, singles = self._backend, self._step, self._num_single
        config, pages = backend.spec.config, backend.layers[layer]
        norm = None if backend.spec.head_norms is None else backend.spec.head_norms[layer]
        cos, sin = self._angles[backend.spec.rope_of_layer[layer]]
        rope_kv(qkv, pages, cos=cos, sin=sin, slots=step.slots, norm=norm, pdl=backend.pdl)
        queries = qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]
        out = qkv.new_empty(len(qkv), config.num_heads, config.head_dim)
        spec = config.layers[layer]
        window = spec.window
        flash_decode(
            queries[:singles],
            pages,
            out[:singles],
            tables=step.tables[:singles],
            lengths=step.lengths[:singles],
            window=window,
            workspace=self._workspace,
            launch=backend.decode_launch,
            pdl=backend.pdl,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        paged_prefill(
            queries[singles:],
            pages,
            out[singles:],
            tables=step.tables[singles:],
            row_starts=step.row_starts[singles:],
            starts=step.starts[singles:],
            window=window,
            launch=backend.prefill_launch,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        return out.flatten(1)
