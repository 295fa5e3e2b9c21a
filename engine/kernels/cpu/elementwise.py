"""The decoder's operations between matrix products in compiled code, each in one pass: csrc/elementwise.cpp.

Values are computed in float32 and rounded once, where they are stored. transformers and the torch layers round
bfloat16 after each operation (norm, times weight, times cosine, plus ...), so bfloat16 differs from them by a few
units in the last place, and is more accurate; float32 differs only by the order of sums and by fused multiply-add.
A row's result depends on that row alone. All results are written to memory that the caller provides.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.attention import CpuAttentionShape
from engine.kernels.cpu.attention_codes import CODE_DTYPES, CodedLayer
from engine.kernels.cpu.gemm import TILE_COLUMNS, check_whole_tiles
from engine.kernels.cpu.library import KernelLibrary
from engine.types.step_inputs import IntArray
from tandem.errors import ConfigError, InvariantError

_LARGEST_HEAD = 1024
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class _RopeWrite(ctypes.Structure):
    """The struct `RopeWrite` of csrc/elementwise.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("angle_stride", "threads")),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotationPlan:
    """Angles and slots of one step's rows, for every layer."""

    call: _RopeWrite
    address: int
    num_rows: int
    kept: tuple[Tensor | IntArray, ...]
    """Arrays that the call points to, kept alive."""


class CpuElementwise:
    """Kernels for one dtype, float32 or bfloat16."""

    def __init__(self, library: KernelLibrary, dtype: torch.dtype, *, num_threads: int) -> None:
        """Raises ConfigError for another dtype."""
        suffix = _SUFFIXES.get(dtype)
        if suffix is None:
            raise ConfigError(f"CPU kernels compute in float32 and bfloat16, not {dtype}")
        self.dtype = dtype
        self.num_threads = num_threads
        self._rms_norm = library.function(f"tandem_rms_norm_{suffix}", "pippiifi")
        self._add_rms_norm = library.function(f"tandem_add_rms_norm_{suffix}", "pipppiifi")
        self._norm_tiles = library.function("tandem_rms_norm_tiles", "pippiifi")
        self._add_norm_tiles = library.function("tandem_add_rms_norm_tiles", "pipppiifi")
        self._silu_mul = library.function(f"tandem_silu_mul_{suffix}", "ppiii")
        self._qk_norm_rope_write = library.function(f"tandem_qk_norm_rope_write_{suffix}", "ppippf")
        self._encode = {
            name: library.function(f"tandem_qk_norm_rope_write_{name}_{suffix}", "ppippf") for name in CODE_DTYPES
        }
        self._gather_rows = library.function("tandem_gather_rows", "piipipii", "i")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Compute `out = x / sqrt(mean(x**2) + eps) * weight` over rows of `[num_rows, size]`; `out` may be `x`.

        `x` may have any row stride.
        """
        self._check_rows(x)
        self._check(weight, out)
        rows, size = x.shape
        self._sizes(size, weight.numel(), out.numel(), rows * size)
        pointers = (x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr())
        self._rms_norm(*pointers, rows, size, eps, self.num_threads)

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add `delta` to `residual`, rounded, in place; then write its norm to `out`; all `[num_rows, size]`.

        `residual` may have any row stride.
        """
        if delta is None:
            self.rms_norm(residual, weight, eps, out)
            return
        self._check_rows(residual)
        self._check(delta, weight, out)
        rows, size = residual.shape
        self._sizes(size, weight.numel(), out.numel(), rows * size)
        self._sizes(size, weight.numel(), delta.numel(), rows * size)
        pointers = (residual.data_ptr(), residual.stride(0), delta.data_ptr(), weight.data_ptr(), out.data_ptr())
        self._add_rms_norm(*pointers, rows, size, eps, self.num_threads)

    def norm_to_tiles(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """Do as `add_rms_norm` for bfloat16 with a multiple of 32 columns; `out` is written in tiles, see
        gemm.Tiles.
        """
        self._check_rows(residual)
        self._check_rows(out)
        self._check(weight, *(() if delta is None else (delta,)))
        rows, size = residual.shape
        self._sizes(size, weight.numel(), rows * size, rows * size if delta is None else delta.numel())
        check_whole_tiles(out)
        if self.dtype is not torch.bfloat16 or out.shape != residual.shape or size % TILE_COLUMNS:
            raise InvariantError(f"{self.dtype} {tuple(residual.shape)} does not become tiles of {tuple(out.shape)}")
        given, target = (residual.data_ptr(), residual.stride(0)), (weight.data_ptr(), out.data_ptr())
        if delta is None:
            self._norm_tiles(*given, *target, rows, size, eps, self.num_threads)
        else:
            self._add_norm_tiles(*given, delta.data_ptr(), *target, rows, size, eps, self.num_threads)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Compute `out = silu(gate) * up` for `[num_rows, 2 * inner]`, gates first, and `out` `[num_rows, inner]`."""
        self._check(gate_up, out)
        rows, size = gate_up.shape
        inner = size // 2
        self._sizes(2 * inner, size, out.numel(), rows * inner)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, inner, self.num_threads)

    def gather_rows(self, table: Tensor, index: Tensor, out: Tensor) -> None:
        """Copy `table[index]` to `out`, for `[table_rows, size]` and int64 `[num_rows]`. InvariantError for a bad
        index.

        `out` may have any row stride.
        """
        self._check(table)
        self._check_rows(out)
        rows, size = index.numel(), table.shape[1]
        self._sizes(size, out.shape[1], out.numel(), rows * size)
        if index.dtype is not torch.int64 or not index.is_contiguous():
            raise InvariantError(f"rows are gathered by contiguous int64, not {index.dtype}")
        table_rows, element = table.shape[0], table.element_size()
        given = (table.data_ptr(), table_rows, size * element, index.data_ptr(), rows)
        refused = self._gather_rows(*given, out.data_ptr(), out.stride(0) * element, self.num_threads)
        if refused:
            raise InvariantError(f"{refused} of {rows} rows to gather lie outside a table of {table_rows}")

    def plan_rotation(self, shape: CpuAttentionShape, cos: Tensor, sin: Tensor, slots: IntArray) -> RotationPlan:
        """Prepare `qk_norm_rope_write` for one step.

        `cos`, `sin`: float32 `[num_rows, head_dim / 2]` of each pair's angle (sine unsigned), perhaps views of
        wider rows; `slots`: `[num_rows]`, block * block_size + offset.
        """
        rows, half = len(slots), shape.head_dim // 2
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        stride = cos.stride(0)
        for angles in (cos, sin):
            if (
                angles.shape != (rows, half)
                or angles.dtype is not torch.float32
                or angles.stride() != (stride, 1)
                or 2 * half != shape.head_dim
            ):
                raise InvariantError(f"angles {angles.dtype} {tuple(angles.shape)} for {rows} rows of {shape}")
        call = _RopeWrite(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.ctypes.data,
            num_rows=rows,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            angle_stride=stride,
            threads=self.num_threads,
        )
        return RotationPlan(call=call, address=ctypes.addressof(call), num_rows=rows, kept=(cos, sin, slots))

    def qk_norm_rope_write(
        self, plan: RotationPlan, qkv: Tensor, cache: Tensor, norm_weight: Tensor | None, eps: float
    ) -> None:
        """Norm heads, rotate pairs (i, i + head_dim / 2), and store keys and values in their slots.

        `qkv`: `[num_rows, num_heads + 2 * num_kv_heads, head_dim]`, with any row stride; its queries are rotated in
        place, its keys and values not changed. `cache`:
        `[num_blocks, 2, num_kv_heads, block_size, head_dim]`. `norm_weight`: `[num_heads + num_kv_heads, head_dim]`
        (Qwen3), or None. Values that are not finite are stored as zero.
        """
        self._check(cache)
        weight = self._check_rope(plan, qkv, norm_weight)
        self._qk_norm_rope_write(plan.address, qkv.data_ptr(), qkv.stride(0), cache.data_ptr(), weight, eps)

    def qk_norm_rope_encode(
        self, plan: RotationPlan, qkv: Tensor, cache: CodedLayer, norm_weight: Tensor | None, eps: float
    ) -> None:
        """Do the same for a cache in codes, with scales as in engine/kv_storage/kv_codes.py."""
        if plan.call.head_dim > _LARGEST_HEAD:
            raise InvariantError(f"a cache in codes holds heads of up to {_LARGEST_HEAD} values")
        weight = self._check_rope(plan, qkv, norm_weight)
        self._encode[cache.dtype](plan.address, qkv.data_ptr(), qkv.stride(0), cache.address, weight, eps)

    def _check_rope(self, plan: RotationPlan, qkv: Tensor, norm_weight: Tensor | None) -> int | None:
        """Check the arguments of a rotation. Returns the address of the weight, or None. Raises InvariantError."""
        call = plan.call
        heads = call.num_heads + call.num_kv_heads
        shape, strides = (plan.num_rows, heads + call.num_kv_heads, call.head_dim), qkv.stride()
        if qkv.shape != shape or strides[1:] != (call.head_dim, 1) or qkv.dtype is not self.dtype:
            raise InvariantError(f"rotation takes {self.dtype} {shape}, not {qkv.dtype} {qkv.shape} {strides}")
        if norm_weight is None:
            return None
        self._check(norm_weight)
        self._sizes(heads * call.head_dim, norm_weight.numel(), 0, 0)
        return norm_weight.data_ptr()

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype is not self.dtype or not tensor.is_contiguous():
                raise InvariantError(f"{self.dtype} kernel given {tensor.dtype} {tensor.shape} {tensor.stride()}")

    def _check_rows(self, tensor: Tensor) -> None:
        if tensor.dtype is not self.dtype or tensor.dim() != 2 or tensor.stride(1) != 1:
            raise InvariantError(f"{self.dtype} kernel given {tensor.dtype} {tensor.shape} {tensor.stride()}")

    def _sizes(self, weight: int, given_weight: int, elements: int, expected: int) -> None:
        if weight != given_weight or elements != expected:
            raise InvariantError(f"sizes {given_weight} and {elements} where {weight} and {expected} are needed")
