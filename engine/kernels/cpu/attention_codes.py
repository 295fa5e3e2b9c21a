"""Paged attention over a cache in int8 or int4 in compiled code; complements `engine.kernels.cpu.attention`.

Single rows go to a kernel that reads codes in place (csrc/attention_codes.h). Other rows, and in deterministic mode
all, go to the kernels of PagedAttention over blocks that are first decoded to the model's dtype, once for all rows of a
chunk: so chunks run on AMX tiles where there are any, and a row's bits are as independent of the batch as there.
Decoded blocks take the memory of one layer of one sequence, or of as many short ones as fit in 64 MiB.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.attention import AttentionMetadata, CpuAttentionShape, PagedAttention
from engine.kernels.cpu.library import KernelLibrary
from engine.types.step_inputs import IntArray, StepInputs
from tandem.errors import ConfigError, InvariantError
from tandem.values.kv_layout import scale_bytes

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_NO_WINDOW = 2**31 - 1
_RESTORED_BYTES = 64 << 20
_UNITS_PER_THREAD = 4
_MIN_SEGMENT_KEYS = 256
_SHARED_ELEMENTS = 2**16
"""Products per dimension, some 10 us of work, below which a single thread is used."""
_LANES = 16
_WORD_BYTES = 4

CODE_DTYPES = ("int8", "int4")
"""Dtypes of a cache that the kernels read."""

Int32Array = NDArray[np.int32]


class _Layer(ctypes.Structure):
    """The struct `CodedLayer` of csrc/codes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("code_stride", "scale_stride")),
    )


class _Step(ctypes.Structure):
    """The struct `CodesStep` of csrc/attention_codes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lengths", "partials")),
        *((name, ctypes.c_int64) for name in ("num_singles", "num_segments", "table_stride", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "head_dim", "block_size", "num_threads")),
        ("scale", ctypes.c_float),
    )


class CodedLayer:
    """One layer's codes and scales in the form that kernels take. Raises InvariantError for another layout."""

    __slots__ = ("_struct", "address", "codes", "dtype", "head_dim", "scales")

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """`codes`: int8 `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, or int4 as uint8, two in each;
        `scales`: as PagedKVCache.layer_scales.
        """
        self.dtype = "int4" if codes.dtype is torch.uint8 else "int8"
        self.head_dim = codes.shape[-1] * (2 if self.dtype == "int4" else 1)
        words = scale_bytes(self.dtype, self.head_dim) // _WORD_BYTES
        expected = (
            (torch.int8, torch.float32, ()) if self.dtype == "int8" else (torch.uint8, torch.bfloat16, (words, 2))
        )
        if (
            (codes.dtype, scales.dtype, scales.shape[4:]) != expected
            or scales.shape[:4] != codes.shape[:4]
            or not codes[:1].is_contiguous()
            or not scales[:1].is_contiguous()
        ):
            raise InvariantError(
                f"cache in codes: {codes.dtype} {tuple(codes.shape)}, {scales.dtype} {tuple(scales.shape)}"
            )
        self.codes = codes
        self.scales = scales
        self._struct = _Layer(
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            code_stride=codes.stride(0),
            scale_stride=scales.stride(0) * scales.itemsize // _WORD_BYTES,
        )
        self.address = ctypes.addressof(self._struct)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Restored:
    """Consecutive sequences that attend to decoded blocks."""

    first_row: int
    end_row: int
    blocks: Int32Array
    """Ids of the cache's blocks, in the order in which they are decoded."""
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodeMetadata:
    """One step's plan for every layer; valid until the next `plan` of the same PagedCodeAttention."""

    step: _Step
    address: int
    num_singles: int
    restored: dict[int | None, tuple[_Restored, ...]]
    """Groups of sequences over decoded blocks, by window."""
    arrays: tuple[Int32Array | Tensor | None, ...]
    """Arrays that the step points to, kept alive."""


class PagedCodeAttention:
    """Causal, grouped-query attention over a cache in codes, with optional sliding windows."""

    def __init__(
        self,
        library: KernelLibrary,
        shape: CpuAttentionShape,
        code_dtype: str,
        *,
        windows: tuple[int | None, ...],
        num_threads: int,
        deterministic: bool = False,
    ) -> None:
        """`shape.dtype`: of queries and results; `code_dtype`: one of CODE_DTYPES; `windows`: of all layers. Raises
        ConfigError as PagedAttention does.
        """
        self._paged = PagedAttention(library, shape, num_threads=num_threads, deterministic=deterministic)
        if shape.dtype not in _SUFFIXES:
            raise ConfigError(f"CPU attention computes in float32 and bfloat16, not {shape.dtype}")
        suffix = _SUFFIXES[shape.dtype]
        self._attend_singles = library.function(f"tandem_attend_singles_{code_dtype}_{suffix}", "pppipi")
        self._restore = library.function(f"tandem_restore_{code_dtype}_{suffix}", "ppiiipi")
        self.shape = shape
        self.code_dtype = code_dtype
        self.num_threads = num_threads
        self._windows = tuple(dict.fromkeys(windows))
        self._in_place = not deterministic and shape.soft_cap is None
        self._partials = torch.empty(0)
        self._blocks = torch.empty(0, 2, shape.num_kv_heads, shape.block_size, shape.head_dim, dtype=shape.dtype)
        self._max_blocks = max(1, _RESTORED_BYTES // (self._vectors_per_block * shape.head_dim * shape.dtype.itemsize))

    def plan(self, inputs: StepInputs) -> CodeMetadata:
        """Lay out one step's work."""
        shape, num_singles = self.shape, inputs.num_single if self._in_place else 0
        tables = inputs.tables[:num_singles].astype(np.int32)
        lengths = inputs.lengths[:num_singles].astype(np.int32)
        work = int(lengths.sum()) * shape.num_heads * shape.head_dim
        num_threads = 1 if work < _SHARED_ELEMENTS else self.num_threads
        segments = self._num_segments(lengths, num_threads)
        partials = self._room(num_singles * segments) if segments > 1 else None
        step = _Step(
            tables=tables.ctypes.data,
            lengths=lengths.ctypes.data,
            partials=None if partials is None else partials.data_ptr(),
            num_singles=num_singles,
            num_segments=segments,
            table_stride=tables.shape[1],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_threads=num_threads,
            scale=shape.score_scale,
        )
        return CodeMetadata(
            step=step,
            address=ctypes.addressof(step),
            num_singles=num_singles,
            restored={window: tuple(self._groups(inputs, num_singles, window)) for window in self._windows},
            arrays=(tables, lengths, partials),
        )

    def attend(
        self, layer: CodedLayer, queries: Tensor, metadata: CodeMetadata, window: int | None, out: Tensor
    ) -> None:
        """Attend in one layer; the step's keys and values must be in the cache already. Tensors as in
        PagedAttention.attend.
        """
        shape, singles = self.shape, metadata.num_singles
        if not (
            queries.dtype is shape.dtype
            and out.dtype is shape.dtype
            and out.is_contiguous()
            and queries.shape[1:] == (shape.num_heads, shape.head_dim)
            and queries.stride()[1:] == (shape.head_dim, 1)
            and out.shape == (len(queries), shape.num_heads * shape.head_dim)
            and (*layer.codes.shape[1:4], layer.head_dim) == self._blocks.shape[1:]
            and layer.dtype == self.code_dtype
        ):
            raise InvariantError(
                f"attention of {shape}: queries {queries.dtype} {tuple(queries.shape)} {queries.stride()}, "
                f"out {out.dtype} {tuple(out.shape)}, {layer.dtype} codes {tuple(layer.codes.shape)}"
            )
        if singles:
            keys = _NO_WINDOW if window is None else window
            pointers = (metadata.address, layer.address, queries.data_ptr(), queries.stride(0), out.data_ptr(), keys)
            self._attend_singles(*pointers)
        for group in metadata.restored[window]:
            blocks = self._restored(layer, group.blocks)
            rows = slice(group.first_row, group.end_row)
            self._paged.attend(blocks, queries[rows], group.metadata, window, out[rows])

    @property
    def _vectors_per_block(self) -> int:
        """Number of head vectors in one block."""
        return 2 * self.shape.num_kv_heads * self.shape.block_size

    def _restored(self, layer: CodedLayer, blocks: Int32Array) -> Tensor:
        """Decode blocks to the model's dtype; the result is valid until the next call."""
        count, size = len(blocks), self.shape.head_dim
        if len(self._blocks) < count:
            self._blocks = self._blocks.new_empty(count, *self._blocks.shape[1:])
        num_threads = 1 if count * self._vectors_per_block * size < _SHARED_ELEMENTS else self.num_threads
        to = self._blocks.data_ptr()
        self._restore(layer.address, blocks.ctypes.data, count, self._vectors_per_block, size, to, num_threads)
        return self._blocks[:count]

    def _groups(self, inputs: StepInputs, begin: int, window: int | None) -> Iterator[_Restored]:
        """Group the sequences from `begin` on; blocks before the window are left out.

        A block that sequences share is decoded for each: the dry run, whose sequences repeat one block, then takes
        as much memory as others.
        """
        ends = np.cumsum(inputs.counts)
        lowest = np.zeros_like(inputs.starts) if window is None else np.maximum(inputs.starts - window + 1, 0)
        firsts = lowest // inputs.block_size
        lasts = -(-inputs.lengths // inputs.block_size)
        while begin < len(inputs.starts):
            totals = np.cumsum(lasts[begin:] - firsts[begin:])
            end = begin + max(1, int(np.searchsorted(totals, self._max_blocks, side="right")))
            first_row = int(ends[begin] - inputs.counts[begin])
            rows = slice(first_row, int(ends[end - 1]))
            blocks, tables = _renumbered(inputs.tables[begin:end], firsts[begin:end], lasts[begin:end])
            part = replace(
                inputs,
                token_ids=inputs.token_ids[rows],
                positions=inputs.positions[rows],
                slots=inputs.slots[rows],
                tables=tables,
                starts=inputs.starts[begin:end],
                counts=inputs.counts[begin:end],
                num_single=int(np.clip(inputs.num_single - begin, 0, end - begin)),
            )
            metadata = self._paged.plan(part)
            yield _Restored(first_row=first_row, end_row=rows.stop, blocks=blocks, metadata=metadata)
            begin = end

    def _num_segments(self, lengths: Int32Array, num_threads: int) -> int:
        """Number of parts into which single rows' keys are cut, so that few sequences occupy all threads."""
        units = len(lengths) * self.shape.num_kv_heads
        if not units or num_threads == 1:
            return 1
        return max(1, min(-(-_UNITS_PER_THREAD * num_threads // units), int(lengths.max()) // _MIN_SEGMENT_KEYS))

    def _room(self, num_parts: int) -> Tensor:
        head = 2 + -(-self.shape.head_dim // _LANES) * _LANES
        needed = num_parts * self.shape.num_heads * head
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed, dtype=torch.float32)
        return self._partials


def _renumbered(tables: IntArray, firsts: IntArray, lasts: IntArray) -> tuple[Int32Array, IntArray]:
    """Blocks `firsts..lasts` of each table one after another, and tables of their new positions, zero elsewhere."""
    columns = np.arange(tables.shape[1])
    used = (columns >= firsts[:, None]) & (columns < lasts[:, None])
    renumbered = np.zeros_like(tables)
    renumbered[used] = np.arange(np.count_nonzero(used))
    return tables[used].astype(np.int32), renumbered
