"""Adapters in slots, and each row's product with its own, in compiled code: csrc/adapters.cpp.

Everything that a kernel reads lies at addresses that stay the same, so that recorded steps go on being right while
adapters come and go and rows change theirs.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from engine.adapters.kernels import MOST_ADAPTERS, adapted_rows
from engine.adapters.packing import RankAdapter, SiteMatrices
from engine.kernels.cpu.library import KernelLibrary
from engine.types.step_inputs import IntArray
from tandem.errors import InvariantError

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_MOST_PARTS = 3  # csrc/adapters.cpp: kMostParts


class _Part(ctypes.Structure):
    """The struct `Part` of csrc/adapters.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_column", "num_columns", "first_value", "rank")),
        ("up", ctypes.c_void_p),
    )


class _Matrices(ctypes.Structure):
    """The struct `Matrices` of csrc/adapters.cpp; all zeros: adds nothing."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_values", "depth", "num_columns", "num_parts")),
        ("parts", _Part * _MOST_PARTS),
    )


class _Rows(ctypes.Structure):
    """The struct `Rows` of csrc/adapters.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "slots")),
        *((name, ctypes.c_int64) for name in ("count", "stride")),
        ("values", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class _StepRows:
    """The rows of a step that have an adapter, at an address of their own."""

    def __init__(self, num_threads: int) -> None:
        self._record = _Rows(threads=num_threads)
        self.address = ctypes.addressof(self._record)
        self._kept: tuple[IntArray, IntArray] | None = None
        self._values = np.empty(0, dtype=np.float32)

    def set(self, rows: IntArray, slots: IntArray, most_values: int) -> None:
        record = self._record
        record.count = len(rows)
        if not len(rows):
            return
        self._kept = rows, slots
        record.rows, record.slots = rows.ctypes.data, slots.ctypes.data
        if self._values.size < len(rows) * most_values:
            self._values = np.empty(len(rows) * most_values, dtype=np.float32)
        record.values, record.stride = self._values.ctypes.data, most_values


class CpuAdapters:
    """Implements engine.adapters.kernels.AdapterKernels for float32 and bfloat16."""

    def __init__(self, library: KernelLibrary, dtype: torch.dtype, *, num_threads: int) -> None:
        self._dtype = dtype
        self._add = library.function(f"tandem_add_adapters_{_SUFFIXES[dtype]}", "ppippi")
        self._sites: dict[int, ctypes.Array[_Matrices]] = {}
        self._held: dict[int, RankAdapter] = {}
        self._most_values: dict[int, int] = {}
        self._all, self._wanted = _StepRows(num_threads), _StepRows(num_threads)
        self._rows = self._all

    def put(self, slot: int, adapter: RankAdapter) -> None:
        """See AdapterKernels. Raises InvariantError for a slot that is not empty or values of another dtype."""
        if slot in self._held or adapter.values.dtype is not self._dtype or not 0 <= slot < MOST_ADAPTERS:
            raise InvariantError(f"adapters in {self._dtype}: slot {slot} given {adapter.values.dtype}")
        self._held[slot] = adapter
        self._most_values[slot] = max((matrices.num_values for matrices in adapter.sites), default=0)
        for matrices in adapter.sites:
            self._slots(matrices.site)[slot] = _record(matrices, adapter.values)

    def drop(self, slot: int) -> None:
        if (adapter := self._held.pop(slot, None)) is None:
            return
        del self._most_values[slot]
        for matrices in adapter.sites:
            self._slots(matrices.site)[slot] = _Matrices()

    def begin(self, slots: IntArray, wanted: IntArray | None) -> None:
        self._rows = self._all
        self._set(self._all, slots, None)
        if wanted is not None:
            self._set(self._wanted, slots, wanted)

    def narrow(self) -> None:
        self._rows = self._wanted

    def add_(self, site: int, x: Tensor, out: Tensor) -> None:
        """See AdapterKernels. Any row strides."""
        given = (x.data_ptr(), x.stride(0), self._rows.address, out.data_ptr(), out.stride(0))
        self._add(ctypes.addressof(self._slots(site)), *given)

    def _set(self, target: _StepRows, slots: IntArray, wanted: IntArray | None) -> None:
        found = adapted_rows(slots, wanted)
        unheld = set(found.slots.tolist()) - self._held.keys()
        if unheld:
            raise InvariantError(f"a step has rows of slot {min(unheld)}, which holds no adapter")
        target.set(*found, max(self._most_values.values(), default=0))

    def _slots(self, site: int) -> "ctypes.Array[_Matrices]":
        """Matrices of a projection by slot."""
        found = self._sites.get(site)
        if found is None:
            found = self._sites[site] = (_Matrices * MOST_ADAPTERS)()
        return found


def _record(matrices: SiteMatrices, values: Tensor) -> _Matrices:
    """A projection's matrices as addresses in an adapter's flat tensor."""
    size, first = values.element_size(), values.data_ptr()
    parts = [
        _Part(
            first_column=part.first_column,
            num_columns=part.num_columns,
            first_value=part.first_value,
            rank=part.rank,
            up=first + part.begin * size,
        )
        for part in matrices.parts
    ]
    return _Matrices(
        down=first + matrices.begin * size,
        num_values=matrices.num_values,
        depth=matrices.depth,
        num_columns=max(part.first_column + part.num_columns for part in matrices.parts),
        num_parts=len(parts),
        parts=(_Part * _MOST_PARTS)(*parts),
    )
