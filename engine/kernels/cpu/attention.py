"""Paged attention in compiled code for a CPU engine: one plan per step and one call per layer.

It uses three kernels (csrc/attention_*). Where AVX512_BF16 is present, single rows in bfloat16 go to a decode
kernel that is limited by memory; chunks in bfloat16 go to AMX tiles where there are any; all else goes to a kernel in
plain vectors for any instruction set, which computes all float32 rows. The last two give a row the same bits whether
it is computed alone or in a chunk of any size, in any batch: `deterministic` uses only them.

Only the slots that hold a sequence's own tokens are read; tables may point anywhere beyond its length. The content of
those slots must be finite, which `CpuElementwise.qk_norm_rope_write` ensures.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.library import KernelLibrary
from engine.types.step_inputs import IntArray, StepInputs
from tandem.errors import ConfigError, InvariantError

_NO_WINDOW = 2**31 - 1
_VECTOR_UNIT_ROWS = 32
"""Rows (positions times heads of a group) of a unit of work: enough to share its keys, few enough for the cache."""
_TILE_UNIT_ROWS = 1024
_TILE_ROWS = 16
_UNITS_PER_THREAD = 4
"""Units for each thread: enough that no thread waits long for another at the end."""
_MIN_SEGMENT_KEYS = 256
_DECODE_UNIT_HEADS = 4
"""Key-value heads that decoding computes together; csrc/attention_decode.h: kDecodeUnitHeads."""
_MAX_DECODE_GROUP = 8
"""Query heads per key-value head up to which decoding is limited by memory; beyond, tiles compute faster."""
_SHARED_ELEMENTS = 2**16
"""Products of a query and a key per dimension, some 10 us of work, below which a single thread is used."""

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAttentionShape:
    """Properties that all layers of a model share. `dtype`: of cache, queries and output."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float | None = None
    """Factor on products of queries and keys; None: `head_dim ** -0.5`."""
    soft_cap: float | None = None
    """Bound that scaled products are bent to; None: unbounded."""

    @property
    def score_scale(self) -> float:
        """Factor on products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


class _Step(ctypes.Structure):
    """The struct `AttentionStep` of csrc/paged.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "starts", "first_rows", "units", "partials")),
        *((name, ctypes.c_int32) for name in ("num_units", "num_singles", "num_segments", "table_stride")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_threads")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """One step's plan for every layer; valid until the next `plan` of the same PagedAttention."""

    step: _Step
    address: int
    num_rows: int
    num_singles: int
    num_units: int
    arrays: tuple[Int32Array | Tensor | None, ...]
    """Arrays that the step points to, kept alive."""


class PagedAttention:
    """Causal, grouped-query attention over a paged cache, with optional sliding windows."""

    def __init__(
        self, library: KernelLibrary, shape: CpuAttentionShape, *, num_threads: int, deterministic: bool = False
    ) -> None:
        """Raises ConfigError for a shape or dtype that the kernels do not serve."""
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"CPU attention computes in float32 and bfloat16, not {shape.dtype}")
        if shape.num_heads % shape.num_kv_heads or min(shape.head_dim, shape.block_size, num_threads) < 1:
            raise ConfigError(f"no attention for {shape} on {num_threads} threads")
        self.shape = shape
        self.num_threads = num_threads
        reduced = shape.dtype is torch.bfloat16
        # Only the kernel in plain vectors bends scores.
        deterministic = deterministic or shape.soft_cap is not None
        tiles = reduced and library.features.amx_bf16 and shape.soft_cap is None
        self._tiles = int(tiles)
        self._unit_rows = _TILE_UNIT_ROWS if tiles else _VECTOR_UNIT_ROWS
        name = "amx" if tiles else "bf16" if reduced else "f32"
        self._attend_units = library.function(f"tandem_attend_units_{name}", "pppipi")
        self._attend_singles: Callable[..., None] | None = None
        reads_once = library.features.avx512_bf16 and not (tiles and shape.group_size > _MAX_DECODE_GROUP)
        if reduced and reads_once and not deterministic:
            self._attend_singles = library.function("tandem_attend_singles_bf16", "pppipii")
        self._partials = torch.empty(0)

    def plan(self, inputs: StepInputs) -> AttentionMetadata:
        """Lay out one step's work; the cost grows with sequences and blocks, not with layers."""
        shape = self.shape
        tables = inputs.tables.astype(np.int32)
        starts, counts = inputs.starts.astype(np.int32), inputs.counts
        first_rows = (np.cumsum(counts) - counts).astype(np.int32)
        num_singles = inputs.num_single if self._attend_singles is not None else 0
        work = int((counts * inputs.lengths).sum()) * shape.num_heads * shape.head_dim
        num_threads = 1 if work < _SHARED_ELEMENTS else self.num_threads
        units = self._units(inputs, num_singles, num_threads)
        num_segments = self._num_segments(inputs.lengths[:num_singles], num_threads)
        partials = self._room(num_singles * num_segments) if num_segments > 1 else None
        step = _Step(
            tables=tables.ctypes.data,
            starts=starts.ctypes.data,
            first_rows=first_rows.ctypes.data,
            units=units.ctypes.data,
            partials=None if partials is None else partials.data_ptr(),
            num_units=len(units),
            num_singles=num_singles,
            num_segments=num_segments,
            table_stride=tables.shape[1] if tables.ndim == 2 else 0,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_threads=num_threads,
            scale=shape.score_scale,
            soft_cap=shape.soft_cap or 0.0,
        )
        return AttentionMetadata(
            step=step,
            address=ctypes.addressof(step),
            num_rows=int(counts.sum()),
            num_singles=num_singles,
            num_units=len(units),
            arrays=(tables, starts, first_rows, units, partials),
        )

    def attend(
        self, cache: Tensor, queries: Tensor, metadata: AttentionMetadata, window: int | None, out: Tensor
    ) -> None:
        """Attend in one layer; the step's keys and values must be in the cache already.

        `cache`: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; `queries`: `[num_rows, num_heads, head_dim]`,
        rotated, perhaps a view of wider rows; `out`: `[num_rows, num_heads * head_dim]`; `window`: number of keys that
        a row attends to, itself included. Raises InvariantError when a tensor has another layout.
        """
        shape = self.shape
        dtype = shape.dtype
        if not (
            cache.dtype is dtype
            and queries.dtype is dtype
            and out.dtype is dtype
            and cache.is_contiguous()
            and out.is_contiguous()
            and queries.shape == (metadata.num_rows, shape.num_heads, shape.head_dim)
            and queries.stride()[1:] == (shape.head_dim, 1)
            and out.numel() == queries.numel()
        ):
            raise InvariantError(
                f"attention over {metadata.num_rows} rows of {shape}: cache {cache.dtype} {tuple(cache.shape)}, "
                f"queries {queries.dtype} {tuple(queries.shape)} {queries.stride()}, out {out.dtype} {tuple(out.shape)}"
            )
        keys = _NO_WINDOW if window is None else window
        layer = (metadata.address, cache.data_ptr(), queries.data_ptr(), queries.stride(0), out.data_ptr(), keys)
        if metadata.num_singles and self._attend_singles is not None:
            self._attend_singles(*layer, self._tiles)
        if metadata.num_units:
            self._attend_units(*layer)

    def _units(self, inputs: StepInputs, num_singles: int, num_threads: int) -> Int32Array:
        """Units `[num_units, 3]`: sequence, first row in it, rows; the costliest first. The cuts change no result."""
        counts, starts = inputs.counts[num_singles:], inputs.starts[num_singles:]
        if not len(counts):
            return np.empty((0, 3), dtype=np.int32)
        size = max(1, self._unit_rows // self.shape.group_size)
        wanted = _UNITS_PER_THREAD * num_threads if num_threads > 1 else 0
        while size * self.shape.group_size > _TILE_ROWS and _num_units(counts, size) * self.shape.num_kv_heads < wanted:
            size = max(1, size // 2)
        per_sequence = -(-counts // size)
        ends = np.cumsum(per_sequence)
        sequence = np.repeat(np.arange(len(counts)), per_sequence)
        first = (np.arange(ends[-1]) - np.repeat(ends - per_sequence, per_sequence)) * size
        rows = np.minimum(size, counts[sequence] - first)
        order = np.argsort(-rows * (starts[sequence] + first + rows), kind="stable")
        return np.stack((sequence + num_singles, first, rows), axis=1)[order].astype(np.int32)

    def _num_segments(self, lengths: IntArray, num_threads: int) -> int:
        """Number of parts into which single rows' keys are cut, so that few sequences occupy all threads."""
        units = len(lengths) * -(-self.shape.num_kv_heads // _DECODE_UNIT_HEADS)
        if not units or num_threads == 1:
            return 1
        longest = int(lengths.max())
        return max(1, min(-(-_UNITS_PER_THREAD * num_threads // units), longest // _MIN_SEGMENT_KEYS))

    def _room(self, num_parts: int) -> Tensor:
        head = 2 + -(-self.shape.head_dim // 32) * 32
        needed = num_parts * self.shape.num_heads * head
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed, dtype=torch.float32)
        return self._partials


def _num_units(counts: IntArray, size: int) -> int:
    return int((-(-counts // size)).sum())
