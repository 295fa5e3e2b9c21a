"""Weights of four or eight bits with a scale for each group of columns, laid out for `group_gemm`.

A word of 16 bits holds a code of each *part* of a span of columns: of four parts, or of two with codes of eight bits.
A span's parts follow each other, so its first `lanes` words hold, in their lowest bits, its first `lanes` columns, in
the next bits the next ones, and so on. A part is thus taken from registers by one shift and one mask, is multiplied by
neighbouring values of a row, and is never in two groups. Scales are stored by groups, so that the features of a tile
find theirs side by side.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.checkpoints.packing import unpack_nibbles
from engine.model.checkpoints.stored_matrix import Fp8Matrix, GroupIntMatrix, Int8Matrix, StoredMatrix

_WORD_BITS = 16
_LANES, _HALF_LANES = 32, 16
"""Columns of a part: as deep as two steps of tensor cores, or one where groups of eight bits are so short."""
_ZEROS = {4: (-128, 127), 8: (0, 255)}
"""By bits, the codes for zero from which the distance of any code is exact in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupWeights:
    """A matrix `[rows, columns]` on a device: `(code - zero) × scale + offset`, or `float × scale`."""

    bits: int
    num_columns: int
    words: Tensor
    """int16 `[rows, spans × lanes]`; columns beyond the last are zeros of any value."""
    scale: Tensor
    """Any float dtype, `[groups, rows]`."""
    zero: Tensor | None
    """int8, of eight bits int16, `[groups, rows]`; None: the middle code, or none for floats."""
    offset: Tensor | None
    """float32 `[groups, rows]`; None: nothing is added."""
    group_size: int
    """Columns of a group: a multiple or a divisor of a span's, and of a part's a multiple."""
    lanes: int
    order: Tensor | None = None
    """int64 `[columns]`: the column of the model that each column here is, where the file has its groups out of order;
    None: the same."""
    is_float: bool = False
    """Whether codes are E4M3 numbers."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.words.shape[0], self.num_columns

    @property
    def span(self) -> int:
        """Columns whose codes share words."""
        return _WORD_BITS // self.bits * self.lanes

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        arrays = (self.words, self.scale, self.zero, self.offset, self.order)
        return sum(array.nbytes for array in arrays if array is not None)


def can_pack(matrix: StoredMatrix) -> bool:
    """Whether `GroupWeights` hold a matrix exactly.

    Integers by runs of a multiple of 32 columns, of eight bits also of 16, or in groups of as many columns in any
    order; E4M3 with a scale for the tensor, each row, or blocks of a multiple of 32 columns. Numbers that are not
    finite are left to whoever restores them, who names them.
    """
    if isinstance(matrix, Int8Matrix):
        return _is_finite(matrix.scale)
    if isinstance(matrix, Fp8Matrix):
        codes = matrix.codes.view(torch.uint8)
        is_number = matrix.codes.dtype is torch.float8_e4m3fn and not bool(((codes & 0x7F) == 0x7F).any())
        return is_number and _is_finite(matrix.scale) and _fits_parts(matrix.block_columns, matrix.shape[1], 8)
    if not isinstance(matrix, GroupIntMatrix) or not _fits_parts(matrix.group_size, matrix.num_columns, matrix.bits):
        return False
    if not _is_finite(matrix.scale) or (matrix.offset is not None and not _is_finite(matrix.offset)):
        return False
    least, most = _ZEROS[matrix.bits]
    low, high = torch.aminmax(matrix.zero)
    return bool(low >= least) and bool(high <= most) and _has_even_groups(matrix)


def pack_groups(matrix: StoredMatrix, device: torch.device | str) -> GroupWeights:
    """Copy a matrix of which `can_pack` holds to a device. Raises TypeError for another kind."""
    match matrix:
        case GroupIntMatrix():
            return _pack_integers(matrix, device)
        case Int8Matrix(codes=codes, scale=scale):
            unsigned = codes.to(device).view(torch.uint8) ^ 0x80
            return _packed(unsigned, 8, matrix.shape[1], scale=_copied(scale, device)[:, None])
        case Fp8Matrix(codes=codes, scale=scale, block_rows=block_rows):
            of_rows = _copied(scale, device).repeat_interleave(block_rows, dim=0)[: codes.shape[0]]
            bits = codes.view(torch.uint8).to(device)
            return _packed(bits, 8, matrix.block_columns, scale=of_rows, is_float=True)
        case _:
            raise TypeError(f"no kernel multiplies a {type(matrix).__name__} by its groups")


def _pack_integers(matrix: GroupIntMatrix, device: torch.device | str) -> GroupWeights:
    codes, order = matrix.codes.to(device), None
    if matrix.bits == 4:
        codes = unpack_nibbles(codes, matrix.num_columns)
    if matrix.group_of_column is not None:
        order = torch.argsort(matrix.group_of_column, stable=True).to(device)
        codes = codes[:, order]
    middle = 1 << (matrix.bits - 1)
    zero = None if bool((matrix.zero == middle).all()) else _copied(matrix.zero, device)
    offset = None if matrix.offset is None else _copied(matrix.offset, device)
    scale = _copied(matrix.scale, device)
    return _packed(codes, matrix.bits, matrix.group_size, scale=scale, zero=zero, offset=offset, order=order)


def _packed(
    codes: Tensor,
    bits: int,
    group_size: int,
    *,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    order: Tensor | None = None,
    is_float: bool = False,
) -> GroupWeights:
    """Pack codes, uint8 `[rows, columns]`; scales and what else belongs to groups are `[rows, groups]`."""
    num_rows, num_columns = codes.shape
    is_whole = group_size >= num_columns
    lanes = _LANES if is_whole or group_size % _LANES == 0 else _HALF_LANES
    parts = _WORD_BITS // bits
    span = parts * lanes
    padded = -(-num_columns // span) * span
    # A group that a span's seam cuts becomes smaller ones.
    size = padded if is_whole else group_size if group_size % span == 0 else gcd(group_size, span)

    def of_groups(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        if not is_whole:
            values = values.repeat_interleave(group_size // size, dim=1)
        missing = max(0, -(-padded // size) - values.shape[1])
        return F.pad(values, (0, missing))[:, : -(-padded // size)].t().contiguous()

    spans = F.pad(codes, (0, padded - num_columns)).view(num_rows, -1, parts, lanes)
    words = torch.zeros(num_rows, padded // span, lanes, dtype=torch.int16, device=codes.device)
    for part in range(parts):
        words |= spans[:, :, part].to(torch.int16) << (bits * part)
    scales = of_groups(scale)
    assert scales is not None  # noqa: S101  # narrows
    return GroupWeights(
        bits=bits,
        num_columns=num_columns,
        words=words.flatten(1),
        scale=scales,
        zero=of_groups(None if zero is None else zero.to(torch.int8 if bits == 4 else torch.int16)),
        offset=of_groups(offset),
        group_size=size,
        lanes=lanes,
        order=order,
        is_float=is_float,
    )


def _fits_parts(group_size: int, num_columns: int, bits: int) -> bool:
    """Whether no part is in two groups."""
    return group_size >= num_columns or group_size % (_LANES if bits == 4 else _HALF_LANES) == 0


def _has_even_groups(matrix: GroupIntMatrix) -> bool:
    """Whether sorting the columns by group makes runs of `group_size`."""
    if matrix.group_of_column is None:
        return True
    counts = torch.bincount(matrix.group_of_column, minlength=matrix.scale.shape[1])
    return bool((counts[:-1] == matrix.group_size).all()) and bool(counts[-1] <= matrix.group_size)


def _copied(values: Tensor, device: torch.device | str) -> Tensor:
    """A copy on every device: what is stored may view a file that is unmapped later."""
    return values.to(device, copy=True)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
