"""Weights in the few canonical forms that all stored formats are read into.

Each form is exact: `dequantized` defines its values, a product of two float32 numbers (and a sum, where there is an
offset), and a part or a stack has the same values as the whole. Rows are output features, columns input features;
arrays are contiguous by rows, and codes of four bits are packed as `engine.model.checkpoints.packing` says, so that a
kernel can read or repack them without knowing which tool wrote the file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import TypeVar

import torch
from torch import Tensor

from engine.model.checkpoints.packing import pack_nibbles, unpack_nibbles
from engine.model.shard import TensorSlice

_MIDDLE = 128
_WITHOUT_SIGN = 0x7F
_FIRST_NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The least code, without its sign, of infinity or no number."""
_BLOCK_VALUES = 2**20
"""Values computed at a time: a whole matrix in float32 would be memory on top of the model's."""

_Form = TypeVar("_Form", bound="StoredMatrix")


class StoredMatrix(ABC):
    """A matrix of weights as it is stored."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that the stored form takes."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> "StoredMatrix":
        """The part with these rows."""

    @abstractmethod
    def columns(self, begin: int, end: int) -> "StoredMatrix":
        """The part with these columns. Groups that the part cuts become smaller ones with the same values."""

    def has_finite_codes(self) -> bool:
        """Whether every code is a number."""
        return True

    def part(self, cut: TensorSlice) -> "StoredMatrix":
        """The part with these rows or columns."""
        return (self.columns if cut.dim else self.rows)(cut.begin, cut.end)

    @abstractmethod
    def restored_rows(self, begin: int, end: int) -> Tensor:
        """The values of some rows, float32 `[end - begin, columns]`."""

    @abstractmethod
    def _joined(self, others: Sequence["StoredMatrix"]) -> "StoredMatrix | None":
        """This matrix's rows, then those of others of the same class; None when one form cannot hold them all."""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The reference: all values, computed in float32 and rounded once to `dtype`, `[rows, columns]`."""
        result = torch.empty(self.shape, dtype=dtype)
        for begin, end in row_blocks(*self.shape):
            result[begin:end] = self.restored_rows(begin, end)
        return result


Weight = Tensor | StoredMatrix
"""A matrix of weights as the loader hands it to a backend: its values, or what is stored where a backend keeps that."""


def as_tensor(weight: Weight) -> Tensor:
    """The values, in a backend that keeps no stored matrix. Raises TypeError for one."""
    if isinstance(weight, StoredMatrix):
        raise TypeError(f"this backend keeps no {type(weight).__name__}")
    return weight


def row_blocks(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, begin and end, to convert one after the other."""
    step = max(1, _BLOCK_VALUES // max(1, num_columns))
    for begin in range(0, num_rows, step):
        yield begin, min(num_rows, begin + step)


def stack(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """One matrix of the parts' rows, for projections that read the same input; dense where their forms differ.

    Raises ValueError when the parts differ in their number of columns, or there are none.
    """
    if not parts or len({part.shape[1] for part in parts}) > 1:
        raise ValueError(f"cannot stack matrices of shapes {[part.shape for part in parts]}")
    return join(parts) or DenseMatrix(values=torch.cat([part.dequantized() for part in parts]))


def join(parts: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """What `stack` makes where one form holds all parts, of which there is at least one; else None."""
    first, *others = parts
    if not others:
        return first
    return first._joined(others) if all(type(part) is type(first) for part in others) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMatrix(StoredMatrix):
    """Values in a float dtype."""

    values: Tensor
    """`[rows, columns]`."""

    @property
    def shape(self) -> tuple[int, int]:
        return _shape(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, begin: int, end: int) -> "DenseMatrix":
        return DenseMatrix(values=self.values[begin:end])

    def columns(self, begin: int, end: int) -> "DenseMatrix":
        return DenseMatrix(values=self.values[:, begin:end].contiguous())

    def restored_rows(self, begin: int, end: int) -> Tensor:
        return self.values[begin:end].float()

    def _joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix:
        return DenseMatrix(values=torch.cat([part.values for part in _same(self, others)]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Matrix(StoredMatrix):
    """Signed bytes with one scale per row: `code × scale`."""

    codes: Tensor
    """int8 `[rows, columns]`."""
    scale: Tensor
    """float32 `[rows]`."""
    rounds_inputs: bool = False
    """Whether it was made to multiply rows that are rounded to eight bits too, each by a scale of its own."""

    @property
    def shape(self) -> tuple[int, int]:
        return _shape(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def rows(self, begin: int, end: int) -> "Int8Matrix":
        return replace(self, codes=self.codes[begin:end], scale=self.scale[begin:end])

    def columns(self, begin: int, end: int) -> "Int8Matrix":
        return replace(self, codes=self.codes[:, begin:end].contiguous())

    def restored_rows(self, begin: int, end: int) -> Tensor:
        return self.codes[begin:end].float() * self.scale[begin:end, None]

    def _joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix:
        parts = _same(self, others)
        return Int8Matrix(
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            rounds_inputs=all(part.rounds_inputs for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupIntMatrix(StoredMatrix):
    """Unsigned integers of four or eight bits, whose scale and zero belong to a group of columns.

    A value is `(code - zero) × scale + offset`. Formats of two and three bits are kept in four, of five and six in
    eight, and so are those of four that are joined with them. Groups are runs of `group_size` columns; a file in
    activation order says the group of each column instead.
    """

    bits: int
    """4 or 8."""
    num_columns: int
    codes: Tensor
    """uint8 `[rows, columns]`, or `[rows, ceil(columns / 2)]` of packed nibbles."""
    scale: Tensor
    """Any float dtype, `[rows, groups]`."""
    zero: Tensor
    """int16 `[rows, groups]`: the code that stands for zero. Outside the codes' range where a file says so."""
    group_size: int
    """Columns of a group; the last may have fewer."""
    offset: Tensor | None = None
    """float32 `[rows, groups]`; None: nothing is added."""
    group_of_column: Tensor | None = None
    """int64 `[columns]`, the group of each column; None: `column // group_size`."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_columns

    @property
    def nbytes(self) -> int:
        arrays = (self.codes, self.scale, self.zero, self.offset, self.group_of_column)
        return sum(array.nbytes for array in arrays if array is not None)

    def rows(self, begin: int, end: int) -> "GroupIntMatrix":
        offset = None if self.offset is None else self.offset[begin:end]
        return self._with(
            codes=self.codes[begin:end], scale=self.scale[begin:end], zero=self.zero[begin:end], offset=offset
        )

    def columns(self, begin: int, end: int) -> "GroupIntMatrix":
        if self.bits == 8:
            codes = self.codes[:, begin:end].contiguous()
        elif begin % 2 == 0:
            codes = pack_nibbles(unpack_nibbles(self.codes[:, begin // 2 : -(-end // 2)], end - begin))
        else:
            codes = pack_nibbles(unpack_nibbles(self.codes, self.num_columns)[:, begin:end])
        if self.group_of_column is not None:
            # All groups stay: which of them the part's columns use is for a kernel to find, if it matters.
            return self._with(
                codes=codes, num_columns=end - begin, group_of_column=self.group_of_column[begin:end].contiguous()
            )
        groups = _ColumnGroups(self.group_size, begin, end)
        return self._with(
            codes=codes,
            num_columns=end - begin,
            scale=groups.cut(self.scale),
            zero=groups.cut(self.zero),
            offset=None if self.offset is None else groups.cut(self.offset),
            group_size=groups.new_size,
        )

    def restored_rows(self, begin: int, end: int) -> Tensor:
        codes = self.codes[begin:end]
        if self.bits == 4:
            codes = unpack_nibbles(codes, self.num_columns)
        values = (codes.float() - self._spread(self.zero, begin, end)) * self._spread(self.scale, begin, end)
        return values if self.offset is None else values + self._spread(self.offset, begin, end)

    def _spread(self, of_groups: Tensor, begin: int, end: int) -> Tensor:
        """Values of groups for each column, float32 `[end - begin, columns]`."""
        some = of_groups[begin:end].float()
        if self.group_of_column is not None:
            return some[:, self.group_of_column]
        return _spread(some, self.group_size, self.num_columns)

    def _joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        parts = _same(self, others)
        if any(part.group_of_column is not None for part in parts):
            return self._joined_in_order(parts)
        if any(part.bits != self.bits for part in parts):
            widened = [part._widened() for part in parts]
            parts = [part for part in widened if part is not None]
            if len(parts) < len(widened):
                return None
        size = _common_size([part.group_size for part in parts], self.num_columns)
        groups = [_ColumnGroups(part.group_size, 0, self.num_columns, new_size=size) for part in parts]
        has_offset = any(part.offset is not None for part in parts)
        offsets = [torch.zeros_like(p.scale, dtype=torch.float32) if p.offset is None else p.offset for p in parts]
        return parts[0]._with(
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([group.cut(part.scale) for group, part in zip(groups, parts, strict=True)]),
            zero=torch.cat([group.cut(part.zero) for group, part in zip(groups, parts, strict=True)]),
            offset=torch.cat([group.cut(offset) for group, offset in zip(groups, offsets, strict=True)])
            if has_offset
            else None,
            group_size=size,
        )

    def _joined_in_order(self, parts: Sequence["GroupIntMatrix"]) -> "GroupIntMatrix | None":
        """Parts whose columns are in the same groups, as of matrices that were quantized for the same inputs."""
        order = self.group_of_column
        for part in parts:
            other = part.group_of_column
            if order is None or other is None or not torch.equal(order, other):
                return None
            if part.bits != self.bits or part.scale.shape[1] != self.scale.shape[1] or part.offset is not None:
                return None
        return self._with(
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat([part.zero for part in parts]),
        )

    def _widened(self) -> "GroupIntMatrix | None":
        """The same values as codes of eight bits, with zero in their middle; None where a code would not fit."""
        if self.bits == 8:
            return self
        shift = _MIDDLE - self.zero
        if bool((shift < 0).any() or (shift > 255 - 15).any()):
            return None
        codes = unpack_nibbles(self.codes, self.num_columns) + _spread(shift, self.group_size, self.num_columns)
        return replace(self, bits=8, codes=codes.to(torch.uint8), zero=torch.full_like(self.zero, _MIDDLE))

    def _with(
        self,
        *,
        codes: Tensor,
        num_columns: int | None = None,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        offset: Tensor | None = None,
        group_size: int | None = None,
        group_of_column: Tensor | None = None,
    ) -> "GroupIntMatrix":
        return GroupIntMatrix(
            bits=self.bits,
            num_columns=self.num_columns if num_columns is None else num_columns,
            codes=codes,
            scale=self.scale if scale is None else scale,
            zero=self.zero if zero is None else zero,
            group_size=group_size or self.group_size,
            offset=offset,
            group_of_column=self.group_of_column if group_of_column is None else group_of_column,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Matrix(StoredMatrix):
    """Floats of eight bits, E4M3 or E5M2, with one scale for each block: of a tensor, a row, or a rectangle."""

    codes: Tensor
    """float8_e4m3fn or float8_e5m2 `[rows, columns]`."""
    scale: Tensor
    """float32 `[blocks of rows, blocks of columns]`."""
    block_rows: int
    """Rows of a block; the last may have fewer."""
    block_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return _shape(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def rows(self, begin: int, end: int) -> "Fp8Matrix":
        blocks = _ColumnGroups(self.block_rows, begin, end)
        return Fp8Matrix(
            codes=self.codes[begin:end],
            scale=blocks.cut(self.scale.t()).t().contiguous(),
            block_rows=blocks.new_size,
            block_columns=self.block_columns,
        )

    def columns(self, begin: int, end: int) -> "Fp8Matrix":
        blocks = _ColumnGroups(self.block_columns, begin, end)
        return Fp8Matrix(
            codes=_bytes(self.codes)[:, begin:end].contiguous().view(self.codes.dtype),
            scale=blocks.cut(self.scale),
            block_rows=self.block_rows,
            block_columns=blocks.new_size,
        )

    def has_finite_codes(self) -> bool:
        first = _FIRST_NOT_FINITE[self.codes.dtype]
        blocks = (_bytes(self.codes[begin:end]) for begin, end in row_blocks(*self.shape))
        return all(bool(((block & _WITHOUT_SIGN) < first).all()) for block in blocks)

    def row_scales(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Scales of each row, all rows if none are named: float32 `[end - begin, blocks of columns]`."""
        return self.scale[torch.arange(begin, self.shape[0] if end is None else end) // self.block_rows]

    def restored_rows(self, begin: int, end: int) -> Tensor:
        of_rows = self.row_scales(begin, end)
        return self.codes[begin:end].float() * _spread(of_rows, self.block_columns, self.shape[1])

    def _joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        parts = _same(self, others)
        if any(part.codes.dtype != self.codes.dtype for part in parts):
            return None
        num_columns = self.shape[1]
        width = _common_size([part.block_columns for part in parts], num_columns)
        # Every seam between parts must be a seam between blocks.
        seams = [part.shape[0] for part in parts[:-1]]
        heights = [part.block_rows for part in parts if part.scale.shape[0] > 1]
        height = reduce(gcd, [*seams, *heights])
        scales = []
        for part in parts:
            wide = _ColumnGroups(part.block_columns, 0, num_columns, new_size=width).cut(part.scale)
            tall = _ColumnGroups(part.block_rows, 0, part.shape[0], new_size=height)
            scales.append(tall.cut(wide.t()).t())
        return Fp8Matrix(
            codes=torch.cat([_bytes(part.codes) for part in parts]).view(self.codes.dtype),
            scale=torch.cat(scales).contiguous(),
            block_rows=height,
            block_columns=width,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table16Matrix(StoredMatrix):
    """Codes of four bits that index a table of sixteen values, scaled by groups of columns: `table[code] × scale`."""

    num_columns: int
    codes: Tensor
    """uint8 `[rows, ceil(columns / 2)]`, packed nibbles."""
    table: Tensor
    """float32 `[16]`."""
    scale: Tensor
    """float32 `[rows, groups]`."""
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_columns

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.table.nbytes + self.scale.nbytes

    def rows(self, begin: int, end: int) -> "Table16Matrix":
        return self._with(self.codes[begin:end], self.scale[begin:end], self.num_columns, self.group_size)

    def columns(self, begin: int, end: int) -> "Table16Matrix":
        codes = unpack_nibbles(self.codes, self.num_columns)[:, begin:end]
        groups = _ColumnGroups(self.group_size, begin, end)
        return self._with(pack_nibbles(codes), groups.cut(self.scale), end - begin, groups.new_size)

    def restored_rows(self, begin: int, end: int) -> Tensor:
        codes = unpack_nibbles(self.codes[begin:end], self.num_columns)
        return self.table[codes.long()] * _spread(self.scale[begin:end], self.group_size, self.num_columns)

    def _joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        parts = _same(self, others)
        if any(not torch.equal(part.table, self.table) for part in parts):
            return None
        size = _common_size([part.group_size for part in parts], self.num_columns)
        scales = [_ColumnGroups(p.group_size, 0, self.num_columns, new_size=size).cut(p.scale) for p in parts]
        return self._with(torch.cat([part.codes for part in parts]), torch.cat(scales), self.num_columns, size)

    def _with(self, codes: Tensor, scale: Tensor, num_columns: int, group_size: int) -> "Table16Matrix":
        return Table16Matrix(num_columns=num_columns, codes=codes, table=self.table, scale=scale, group_size=group_size)


class _ColumnGroups:
    """Groups of a range of columns: where its beginning cuts a group, all are divided into equal smaller ones."""

    __slots__ = ("_begin", "_end", "_old_size", "new_size")

    def __init__(self, size: int, begin: int, end: int, *, new_size: int | None = None) -> None:
        """`new_size`: what to divide the groups into, of a range that begins with a group; None: the largest that
        fits.
        """
        is_one = begin // size == max(begin, end - 1) // size
        self.new_size = new_size or (size if is_one else gcd(size, begin))
        self._old_size = size
        self._begin = begin
        self._end = end

    def cut(self, of_groups: Tensor) -> Tensor:
        """Values of the range's groups, contiguous `[rows, groups]`, from those of all groups."""
        starts = torch.arange(self._begin, self._end, self.new_size)
        return of_groups[:, starts // self._old_size]


def _common_size(sizes: Sequence[int], num_columns: int) -> int:
    """The largest size that divides those of all groups; groups of whole rows have no seam to respect."""
    inner = [size for size in sizes if size < num_columns]
    return reduce(gcd, inner) if inner else max(1, num_columns)


def _spread(of_groups: Tensor, group_size: int, num_columns: int) -> Tensor:
    """Values of groups, `[rows, groups]`, for each column: `[rows, columns]`."""
    if of_groups.shape[1] == 1:
        return of_groups.expand(-1, num_columns)
    return of_groups[:, :, None].expand(-1, -1, group_size).flatten(1)[:, :num_columns]


def _shape(values: Tensor) -> tuple[int, int]:
    rows, columns = values.shape
    return rows, columns


def _bytes(codes: Tensor) -> Tensor:
    """The bits of 8-bit floats, which torch cannot copy or join in every way."""
    return codes.view(torch.uint8)


def _same(first: _Form, others: Sequence[StoredMatrix]) -> list[_Form]:
    return [first, *(other for other in others if isinstance(other, type(first)))]
