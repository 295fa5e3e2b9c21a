"""The Triton attention kernels behind the engine's attention Protocols, and the upload of a step's metadata.

A step's arrays are packed into one piece of pinned memory and copied in one asynchronous transfer. The pinned memory
comes from torch's caching allocator, which reuses it only when the copy is done; so the host may lay out the
next step while the device still reads this one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.triton.flash_decode import (
    DecodeCut,
    DecodeWorkspace,
    are_uneven,
    choose_launch,
    cut_by_length,
    cut_evenly,
    flash_decode,
)
from engine.kernels.triton.paged_prefill import paged_prefill
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.rope_kv import rope_kv
from engine.kernels.triton.tuning import AttentionShape, LaunchTable
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionSpec
from engine.types.step_inputs import StepInputs

_CPU_SMS = 8
"""Number of multiprocessors to plan for on a CPU, in Triton's interpreter."""
_MAX_IDLE_PROGRAMS = 1 << 14
"""Programs of a layer's decode attention that a recorded step may have for runs that few steps have: idle, they take
some five microseconds."""


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, by which work is divided; some on a CPU, for the interpreter."""
    if device.type != "cuda":
        return _CPU_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class DeviceStep(NamedTuple):
    """One step's metadata on the device."""

    slots: Tensor  # int64 [num_rows], negative for padding
    token_ids: Tensor  # int64 [num_rows]
    positions: Tensor  # int32 [num_rows]
    lengths: Tensor  # int32 [num_single], of the sequences with one row; 0 for padding
    starts: Tensor  # int32 [num_several], of those with several
    row_starts: Tensor  # int32 [num_several + 1], the first row of each, and the end of the last
    tables: Tensor  # int32 [num_single + num_several, max_blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Offsets of a step's arrays in one int32 buffer: 64-bit arrays first, for their alignment, tables last.

    It may have room for more rows and sequences than a step has. Then rows follow each other all the same, so some that
    are counted among those of sequences with one row may belong to a sequence with several.
    """

    num_rows: int
    num_single: int
    """Sequences with one row."""
    num_several: int
    """Sequences with several rows."""

    @classmethod
    def of(cls, inputs: StepInputs) -> "StepLayout":
        """The layout without room for more."""
        num_single = inputs.num_single
        return cls(num_rows=len(inputs.token_ids), num_single=num_single, num_several=len(inputs.starts) - num_single)

    @property
    def table_begin(self) -> int:
        """Number of words before the tables."""
        return 5 * self.num_rows + self.num_single + 2 * self.num_several + 1

    def holds(self, inputs: StepInputs) -> bool:
        """Whether there is room for all rows and sequences of a step."""
        own = StepLayout.of(inputs)
        return (
            own.num_rows <= self.num_rows and own.num_single <= self.num_single and own.num_several <= self.num_several
        )

    def views(self, words: Tensor, tables: Tensor) -> DeviceStep:
        """View the arrays in `words`, int32 of at least `table_begin` elements."""
        rows, starts_begin = self.num_rows, 5 * self.num_rows + self.num_single
        wide, ends_begin = words[: 4 * rows].view(torch.int64), starts_begin + self.num_several
        return DeviceStep(
            slots=wide[:rows],
            token_ids=wide[rows:],
            positions=words[4 * rows : 5 * rows],
            lengths=words[5 * rows : starts_begin],
            starts=words[starts_begin:ends_begin],
            row_starts=words[ends_begin : self.table_begin],
            tables=tables,
        )

    def pack(self, inputs: StepInputs, words: NDArray[np.int32]) -> None:
        """Fill everything but the tables; unused rows and sequences become padding."""
        rows, own = self.num_rows, StepLayout.of(inputs)
        used, singles = own.num_rows, own.num_single
        words[:] = 0
        wide = words[: 4 * rows].view(np.int64)
        wide[:rows] = -1
        wide[:used] = inputs.slots
        wide[rows : rows + used] = inputs.token_ids
        words[4 * rows : 4 * rows + used] = inputs.positions
        words[5 * rows : 5 * rows + singles] = inputs.lengths[:singles]
        several = words[5 * rows + self.num_single : self.table_begin]
        several[: own.num_several] = inputs.starts[singles:]
        row_starts = several[self.num_several :]
        row_starts[0] = singles
        row_starts[1:] = used  # of padding: no rows
        row_starts[1 : 1 + own.num_several] = singles + np.cumsum(inputs.counts[singles:])


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
        self._decode_launches = table.decode(shape, deterministic=deterministic)
        self.layers = tuple(_pages(spec, cache, i) for i in range(config.num_layers))
        self._num_tokens = cache.num_blocks * cache.layout.block_size
        self._num_sms = num_multiprocessors(self.device)

    def plan(self, inputs: StepInputs) -> "CudaAttentionPlan":
        layout = StepLayout.of(inputs)
        step = layout.views(*upload(inputs, layout, self.device))
        lengths = inputs.lengths[: inputs.num_single]
        if self.fixed_keys:
            cut = self.cut_by_length(further_runs=self.further_runs(lengths))
        elif are_uneven(lengths):
            cut = self.cut_by_length()
        else:
            cut = self.cut_evenly(max(1, len(lengths)), int(lengths.max(initial=0)))
        return CudaAttentionPlan(self, step, cut)

    @property
    def fixed_keys(self) -> int:
        """Keys of each run in deterministic mode; otherwise 0."""
        return self._decode_launches[0].fixed_keys

    def cut_evenly(self, batch: int, max_length: int) -> DecodeCut:
        """For `batch` sequences of about equal lengths up to `max_length`; not in deterministic mode."""
        heads = self.spec.config.num_kv_heads
        return cut_evenly(
            self._decode_launches, batch=batch, num_kv_heads=heads, max_length=max_length, num_sms=self._num_sms
        )

    def cut_by_length(self, batch: int = 1, *, further_runs: int = 0) -> DecodeCut:
        """For sequences of any lengths, with the launch for `batch` whole ones: by default that for fewest programs,
        which are the first to end when sequences are unequal. `further_runs`: see there.
        """
        heads, sms = self.spec.config.num_kv_heads, self._num_sms
        launch = choose_launch(self._decode_launches, batch=batch, num_kv_heads=heads, num_sms=sms)
        return cut_by_length(launch, num_kv_heads=heads, num_sms=sms, further_runs=further_runs)

    def further_runs(self, lengths: NDArray[np.integer[Any]]) -> int:
        """Runs of sequences of these lengths in deterministic mode, the first of each not counted."""
        return int(((lengths - 1) // self.fixed_keys).sum()) if self.fixed_keys else 0

    def most_further_runs(self, batch: int, max_length: int) -> int:
        """As many as are worth recording room for, with sequences of up to `max_length` tokens."""
        if not self.fixed_keys:
            return 0
        by_length, by_pool = batch * ((max_length - 1) // self.fixed_keys), self._num_tokens // self.fixed_keys
        # Sequences that share blocks may have more than the pool has room for; steps of such are launched.
        return min(by_length, by_pool, _MAX_IDLE_PROGRAMS // self.spec.config.num_kv_heads)

    def workspace(self, batch: int, cut: DecodeCut) -> DecodeWorkspace | None:
        """Memory for decoding `batch` sequences; None when they are not cut."""
        if cut.num_splits == 1:
            return None
        config = self.spec.config
        return DecodeWorkspace.allocate(cut.num_parts(batch), config.num_heads, config.head_dim, self.device)


def _pages(spec: AttentionSpec, cache: PagedKVCache, index: int) -> LayerPages:
    pages = cache.layer(index)
    if pages.dtype is not torch.float8_e4m3fn:
        return LayerPages(pages=pages, token_scales=cache.layer_scales(index))
    if spec.kv_scales is None:
        return LayerPages(pages=pages, head_scales=torch.ones(pages.shape[1:3], device=pages.device))
    return LayerPages(pages=pages, head_scales=spec.kv_scales[index])


class CudaAttentionPlan:
    """One step's attention on the GPU: metadata uploaded once, used by every layer."""

    __slots__ = ("_angles", "_backend", "_cut", "_has_spare_rows", "_step", "_workspace")

    def __init__(
        self, backend: CudaAttention, step: DeviceStep, cut: DecodeCut, *, has_spare_rows: bool = False
    ) -> None:
        """`cut`: of the sequences with one row. `has_spare_rows`: there may be rows of no sequence behind the
        others.
        """
        self._backend = backend
        self._step = step
        self._has_spare_rows = has_spare_rows
        self._angles = tuple(rope.half_angles(step.positions) for rope in backend.spec.ropes)
        self._cut = cut
        self._workspace = backend.workspace(len(step.lengths), cut)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        backend, step, singles = self._backend, self._step, len(self._step.lengths)
        config, pages = backend.spec.config, backend.layers[layer]
        norm = None if backend.spec.head_norms is None else backend.spec.head_norms[layer]
        cos, sin = self._angles[backend.spec.rope_of_layer[layer]]
        rope_kv(qkv, pages, cos=cos, sin=sin, slots=step.slots, norm=norm, pdl=backend.pdl)
        queries = qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]
        out = qkv.new_empty(len(qkv), config.num_heads, config.head_dim)
        if self._has_spare_rows:
            out[singles:].zero_()  # what memory happens to hold may be beyond all numbers
        spec = config.layers[layer]
        window = spec.window
        flash_decode(
            queries[:singles],
            pages,
            out[:singles],
            tables=step.tables[:singles],
            lengths=step.lengths,
            window=window,
            cut=self._cut,
            workspace=self._workspace,
            pdl=backend.pdl,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        # After it: what belongs to a sequence with several rows is written over padding's zeros.
        paged_prefill(
            queries,
            pages,
            out,
            tables=step.tables[singles:],
            row_starts=step.row_starts,
            starts=step.starts,
            window=window,
            launch=backend.prefill_launch,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        return out.flatten(1)
