"""Norms beyond RMSNorm before a projection, GELU's gate and soft caps in compiled code: csrc/norms.cpp.

As in `engine.kernels.cpu.elementwise`, values are computed in float32 and rounded once, a row's result depends on that
row alone, and all results are written to memory that the caller provides.
"""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from engine.kernels.cpu.gemm import TILE_COLUMNS, check_whole_tiles
from engine.kernels.cpu.library import KernelLibrary
from tandem.errors import ConfigError, InvariantError

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NormMode(IntEnum):
    """What a norm does; the numbers are those of csrc/norms.cpp."""

    RMS = 0
    LAYER = 1
    NONE = 2


class _Norm(ctypes.Structure):
    """The struct `Norm` of csrc/norms.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("mode", "size", "groups", "threads")),
        ("eps", ctypes.c_float),
    )


class CompiledNorm:
    """One norm of a model, over groups of `size` neighbouring values of a row."""

    __slots__ = (
        "_add",
        "_add_tiles",
        "_address",
        "_groups",
        "_record",
        "bias",
        "dtype",
        "num_groups",
        "size",
        "weight",
    )

    def __init__(
        self,
        library: KernelLibrary,
        mode: NormMode,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        size: int,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        """`weight`: `[num_groups, size]`, None with NONE; `bias`: `[size]`. Raises ConfigError for another dtype."""
        if dtype not in _SUFFIXES:
            raise ConfigError(f"CPU kernels compute in float32 and bfloat16, not {dtype}")
        for given in (weight, bias):
            if given is not None and (given.dtype is not dtype or not given.is_contiguous() or given.shape[-1] != size):
                raise InvariantError(f"a norm of {size} values in {dtype} given {given.dtype} {tuple(given.shape)}")
        self.weight = weight
        self.bias = bias
        self.size = size
        self.dtype = dtype
        self.num_groups = 1 if weight is None else weight.numel() // size
        self._record = _Norm(
            weight=None if weight is None else weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            mode=int(mode),
            size=size,
            groups=self.num_groups,
            threads=num_threads,
            eps=eps,
        )
        self._address = ctypes.addressof(self._record)
        self._add = library.function(f"tandem_add_norm_{_SUFFIXES[dtype]}", "ppippi")
        self._add_tiles = library.function("tandem_add_norm_tiles", "ppippi")
        self._groups = library.function(f"tandem_norm_groups_{_SUFFIXES[dtype]}", "ppii")

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        return sum(given.nbytes for given in (self.weight, self.bias) if given is not None)

    def add(self, residual: Tensor, delta: Tensor | None, out: Tensor) -> None:
        """Add `delta` to `residual`, rounded, in place; then write its norm to `out`; all `[num_rows, size]`.

        `residual` may have any row stride. Raises InvariantError for other shapes.
        """
        self._check(residual, delta)
        if out.shape != residual.shape or out.dtype is not self.dtype or not out.is_contiguous():
            raise InvariantError(f"a norm of {tuple(residual.shape)} does not fit {out.dtype} {tuple(out.shape)}")
        given = (residual.data_ptr(), residual.stride(0), None if delta is None else delta.data_ptr())
        self._add(self._address, *given, out.data_ptr(), residual.shape[0])

    def add_to_tiles(self, residual: Tensor, delta: Tensor | None, out: Tensor) -> None:
        """Do the same for bfloat16 with a multiple of 32 columns; `out` is written in tiles, see gemm.Tiles."""
        self._check(residual, delta)
        check_whole_tiles(out)
        if self.dtype is not torch.bfloat16 or out.shape != residual.shape or self.size % TILE_COLUMNS:
            raise InvariantError(f"{self.dtype} {tuple(residual.shape)} does not become tiles of {tuple(out.shape)}")
        given = (residual.data_ptr(), residual.stride(0), None if delta is None else delta.data_ptr())
        self._add_tiles(self._address, *given, out.data_ptr(), residual.shape[0])

    def apply_(self, rows: Tensor) -> Tensor:
        """Norm each group of `[num_rows, num_groups * size]` in place, without a bias; any row stride. Returns
        `rows`.
        """
        if rows.dim() != 2 or rows.shape[1] != self.num_groups * self.size or rows.dtype is not self.dtype:
            raise InvariantError(f"{self.num_groups} norms of {self.size} given {rows.dtype} {tuple(rows.shape)}")
        if rows.stride(1) != 1 or self.bias is not None:
            raise InvariantError(f"rows are normed in place if contiguous and without bias, not {rows.stride()}")
        self._groups(self._address, rows.data_ptr(), rows.stride(0), rows.shape[0])
        return rows

    def _check(self, residual: Tensor, delta: Tensor | None) -> None:
        wanted = (residual.shape[0], self.size)
        if residual.shape != wanted or residual.stride(1) != 1 or residual.dtype is not self.dtype:
            raise InvariantError(f"a norm of {self.size} values given {residual.dtype} {tuple(residual.shape)}")
        if delta is not None and (delta.shape != wanted or delta.dtype is not self.dtype or not delta.is_contiguous()):
            raise InvariantError(f"a norm of {wanted} given {delta.dtype} {tuple(delta.shape)} to add")


class CpuActivations:
    """GELU's gate, and soft caps, for one dtype, float32 or bfloat16."""

    def __init__(self, library: KernelLibrary, dtype: torch.dtype, *, num_threads: int) -> None:
        self._dtype = dtype
        self._num_threads = num_threads
        self._gelu_mul = library.function(f"tandem_gelu_mul_{_SUFFIXES[dtype]}", "pipiiii")
        self._gelu_mul_tiles = library.function("tandem_gelu_mul_tiles", "pipiii")
        self._soft_cap = library.function("tandem_soft_cap", "pifi")

    def gelu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Compute `out = gelu(gate) * up` for `[num_rows, 2 * inner]`, gates first, and `out` `[num_rows, inner]`, by
        the tanh approximation. Any row strides.
        """
        rows, inner = self._check(gate_up, out)
        given = (gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0))
        self._gelu_mul(*given, rows, inner, self._num_threads)

    def gelu_mul_to_tiles(self, gate_up: Tensor, out: Tensor) -> None:
        """Do the same for bfloat16 with a multiple of 32 columns; `out` is written in tiles, see gemm.Tiles."""
        rows, inner = self._check(gate_up, out)
        check_whole_tiles(out)
        if self._dtype is not torch.bfloat16 or inner % TILE_COLUMNS:
            raise InvariantError(f"{self._dtype} {tuple(out.shape)} does not become tiles")
        self._gelu_mul_tiles(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, inner, self._num_threads)

    def soft_cap_(self, values: Tensor, cap: float) -> Tensor:
        """Bend contiguous float32 values to `cap * tanh(value / cap)` in place. Returns them."""
        if values.dtype is not torch.float32 or not values.is_contiguous():
            raise InvariantError(f"soft caps take contiguous float32, not {values.dtype} {values.stride()}")
        self._soft_cap(values.data_ptr(), values.numel(), cap, self._num_threads)
        return values

    def _check(self, gate_up: Tensor, out: Tensor) -> tuple[int, int]:
        rows, inner = out.shape
        for given, columns in ((gate_up, 2 * inner), (out, inner)):
            if given.shape != (rows, columns) or given.stride(1) != 1 or given.dtype is not self._dtype:
                raise InvariantError(f"a gate of {rows} x {inner} given {given.dtype} {tuple(given.shape)}")
        return rows, inner
