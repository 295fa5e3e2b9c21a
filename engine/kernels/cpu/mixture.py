"""Mixtures of experts over packed matrices of any form in one call: csrc/mixture.cpp.

A call reads the experts that its rows are routed to. A row's result never depends on the other rows or on the number of
threads, as a product's does not.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.gemm import PackedLinear
from engine.kernels.cpu.library import KernelLibrary
from engine.model.spec import MoeSpec
from tandem.errors import InvariantError

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_NUM_ARRAYS = 8
_ALIGNMENT = 64  # csrc/mixture.cpp: kAlignment


class _Matrix(ctypes.Structure):
    _fields_ = (("multiply", ctypes.c_void_p), ("linear", ctypes.c_void_p))


class _Expert(ctypes.Structure):
    _fields_ = (("gate_up", _Matrix), ("down", _Matrix))


class _Mixture(ctypes.Structure):
    """The struct `Mixture` of csrc/mixture.cpp."""

    _fields_ = (
        ("router", _Matrix),
        ("experts", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("num_experts", "per_row", "has_shared", "normalizes", "size", "largest_gate")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedExpert:
    """The matrices of one expert."""

    gate_up: PackedLinear
    """With the epilogue GATED."""
    down: PackedLinear
    """With STORE_FLOAT32, as what experts return is rounded once they are summed."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights."""
        return self.gate_up.nbytes + self.down.nbytes


class PackedMixture:
    """Computes each row by the experts that its router chooses, and sums what they return, weighted."""

    __slots__ = ("_array", "_compute", "_experts", "_record", "_router", "_threads", "dtype", "scratch_bytes", "size")

    def __init__(
        self,
        library: KernelLibrary,
        moe: MoeSpec,
        router: PackedLinear,
        experts: Sequence[PackedExpert],
        *,
        num_threads: int,
    ) -> None:
        """`router`: with STORE_FLOAT32; `experts`: the shared one last. Raises InvariantError for matrices that do not
        fit together.
        """
        self.size = router.depth
        self.dtype = router.dtype
        _check(moe, router, experts)
        self._router = router
        self._experts = tuple(experts)
        self._array = (_Expert * len(experts))(
            *(_Expert(gate_up=_matrix(expert.gate_up), down=_matrix(expert.down)) for expert in experts)
        )
        largest_gate = max(expert.gate_up.columns for expert in experts)
        self._record = _Mixture(
            router=_matrix(router),
            experts=ctypes.addressof(self._array),
            num_experts=moe.num_experts,
            per_row=moe.experts_per_token,
            has_shared=moe.has_shared,
            normalizes=moe.normalizes_weights,
            size=self.size,
            largest_gate=largest_gate,
        )
        slots = moe.experts_per_token + moe.has_shared
        floats = len(experts) + 3 * slots + 2 * self.size
        values = largest_gate + self.size
        self.scratch_bytes = floats * 4 + values * self.dtype.itemsize + _NUM_ARRAYS * _ALIGNMENT
        """Memory that a call needs for each of its rows."""
        self._threads = num_threads
        self._compute = library.function(f"tandem_mixture_{_SUFFIXES[self.dtype]}", "ppiippii")

    @property
    def nbytes(self) -> int:
        """Memory of router and experts."""
        return self._router.nbytes + sum(expert.nbytes for expert in self._experts)

    def __call__(self, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Compute `x` `[num_rows, size]` into `out`, likewise, which must not overlap it.

        Any row strides, but contiguous elements. `scratch`: contiguous uint8, `scratch_bytes` for each row, whose
        content is lost. Raises InvariantError for any other shape, layout or type.
        """
        rows = x.shape[0]
        for given in (x, out):
            if given.shape != (rows, self.size) or given.stride(1) != 1 or given.dtype is not self.dtype:
                raise InvariantError(f"experts of rows of {self.size} given {given.dtype} {tuple(given.shape)}")
        if (
            scratch.dtype is not torch.uint8
            or not scratch.is_contiguous()
            or scratch.nbytes < rows * self.scratch_bytes
        ):
            raise InvariantError(f"{rows} rows of experts need {rows * self.scratch_bytes} bytes, not {scratch.nbytes}")
        self._compute(
            ctypes.addressof(self._record),
            x.data_ptr(),
            x.stride(0),
            rows,
            scratch.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            self._threads,
        )


def _matrix(linear: PackedLinear) -> _Matrix:
    return _Matrix(multiply=linear.kernel_address, linear=linear.record_address)


def _check(moe: MoeSpec, router: PackedLinear, experts: Sequence[PackedExpert]) -> None:
    count, size = moe.num_experts + moe.has_shared, router.depth
    if len(experts) != count or router.columns != count or router.out_dtype is not torch.float32:
        raise InvariantError(f"a router of {router.columns} columns in {router.out_dtype} for {len(experts)} experts")
    for expert in experts:
        gate_up, down = expert.gate_up, expert.down
        if (gate_up.depth, down.columns) != (size, size) or gate_up.columns != down.depth:
            raise InvariantError(f"an expert from {gate_up.depth} to {down.columns} values in rows of {size}")
        dtypes = (gate_up.dtype, gate_up.out_dtype, down.dtype)
        if dtypes != (router.dtype,) * 3 or down.out_dtype is not torch.float32:
            raise InvariantError(f"an expert that computes in {dtypes} and returns {down.out_dtype}")
