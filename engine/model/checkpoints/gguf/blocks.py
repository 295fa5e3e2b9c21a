"""The block types of ggml as stored matrices: how each lays out codes, scales and minima in a block's bytes.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. `d` is a block's scale and `m` its minimum, float16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import DenseMatrix, GroupIntMatrix, StoredMatrix, Table16Matrix

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_GROUP = 32
_OF_FIVE, _OF_SIX = 112, 96
"""What is added to codes of five and six bits: so they lie around the middle of eight, as kernels have them."""
_GROUPS_K = 8
"""Groups of a block of 256 values in the "K" types, but Q6_K."""


def block_matrix(type_name: str, raw: Tensor) -> StoredMatrix:
    """Make the matrix of stored bytes, uint8 `[rows, bytes of a row]`, of a type of `container.BLOCK_TYPES`.

    Raises ValueError where a scale is not finite.
    """
    matrix = _READERS[type_name](raw.contiguous())
    if isinstance(matrix, GroupIntMatrix | Table16Matrix):
        offset = matrix.offset if isinstance(matrix, GroupIntMatrix) else None
        if not all(array is None or bool(torch.isfinite(array).all()) for array in (matrix.scale, offset)):
            raise ValueError("has scales that are not finite")
    return matrix


def _dense(dtype: torch.dtype) -> Callable[[Tensor], StoredMatrix]:
    # A row may begin anywhere in the file, and torch views only what is aligned.
    return lambda raw: DenseMatrix(values=raw.clone().view(dtype))


def _q4_0(raw: Tensor) -> StoredMatrix:
    """Bytes: d, 16 of nibbles; value (q - 8) × d."""
    blocks = _blocks(raw, 18)
    return _grouped(4, _split_nibbles(blocks[:, :, 2:]), _half(blocks, 0), zero=8)


def _q4_1(raw: Tensor) -> StoredMatrix:
    """Bytes: d, m, 16 of nibbles; value q × d + m."""
    blocks = _blocks(raw, 20)
    return _grouped(4, _split_nibbles(blocks[:, :, 4:]), _half(blocks, 0), offset=_half(blocks, 2).float())


def _q5_0(raw: Tensor) -> StoredMatrix:
    """Bytes: d, 4 of fifth bits, 16 of nibbles; value (q - 16) × d."""
    blocks = _blocks(raw, 22)
    codes = _split_nibbles(blocks[:, :, 6:]) | (_bits(blocks[:, :, 2:6]) << 4)
    return _grouped(8, codes + _OF_FIVE, _half(blocks, 0), zero=_OF_FIVE + 16)


def _q5_1(raw: Tensor) -> StoredMatrix:
    """Bytes: d, m, 4 of fifth bits, 16 of nibbles; value q × d + m."""
    blocks = _blocks(raw, 24)
    codes = _split_nibbles(blocks[:, :, 8:]) | (_bits(blocks[:, :, 4:8]) << 4)
    return _grouped(8, codes + _OF_FIVE, _half(blocks, 0), zero=_OF_FIVE, offset=_half(blocks, 2).float())


def _q8_0(raw: Tensor) -> StoredMatrix:
    """Bytes: d, 32 signed codes; value q × d."""
    blocks = _blocks(raw, 34)
    return _grouped(8, blocks[:, :, 2:] ^ 128, _half(blocks, 0), zero=128)  # adds 128 to a signed byte


def _q4_k(raw: Tensor) -> StoredMatrix:
    """Bytes: d, dmin, 12 of scales and minima, 128 of nibbles; value q × (d × scale) - dmin × minimum."""
    blocks = _blocks(raw, 144)
    return _grouped_k(4, blocks, _paired_nibbles(blocks[:, :, 16:]))


def _q5_k(raw: Tensor) -> StoredMatrix:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of a byte is for group g."""
    blocks = _blocks(raw, 176)
    fifth = (blocks[:, :, None, 16:48] >> torch.arange(_GROUPS_K, dtype=torch.uint8)[:, None]) & 1
    codes = _paired_nibbles(blocks[:, :, 48:]) | (fifth.flatten(2) << 4)
    return _grouped_k(8, blocks, codes + _OF_FIVE, zero=_OF_FIVE)


def _q6_k(raw: Tensor) -> StoredMatrix:
    """Bytes: 128 of low nibbles, 64 of two high bits, 16 signed scales, d; value (q - 32) × (d × scale)."""
    blocks = _blocks(raw, 210)
    halves = _split(blocks[:, :, :128], 2, 1, 64)
    low = torch.cat((halves & 15, halves >> 4), dim=3).flatten(2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (_split(blocks[:, :, 128:192], 2, 1, 32) >> shifts) & 3
    scale = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).float()[:, :, None]
    return _grouped(8, (low | (high.flatten(2) << 4)) + _OF_SIX, scale.flatten(1), zero=_OF_SIX + 32)


def _iq4_nl(raw: Tensor) -> StoredMatrix:
    """Bytes: d, 16 of nibbles; value table[q] × d."""
    blocks = _blocks(raw, 18)
    codes = _split_nibbles(blocks[:, :, 2:]).flatten(1)
    return Table16Matrix(
        num_columns=codes.shape[1],
        codes=pack_nibbles(codes),
        table=torch.tensor(_IQ4_NL, dtype=torch.float32),
        scale=_half(blocks, 0).float(),
        group_size=_GROUP,
    )


_READERS: dict[str, Callable[[Tensor], StoredMatrix]] = {
    "F32": _dense(torch.float32),
    "F16": _dense(torch.float16),
    "BF16": _dense(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}


def _blocks(raw: Tensor, num_bytes: int) -> Tensor:
    """Bytes `[rows, blocks, bytes]`."""
    return raw.view(raw.shape[0], -1, num_bytes)


def _split(blocks: Tensor, *shape: int) -> Tensor:
    """Bytes of blocks, `[rows, blocks, *shape]`."""
    return blocks.reshape(*blocks.shape[:2], *shape)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """A float16 of each block, `[rows, blocks]`."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).squeeze(2)


def _split_nibbles(stored: Tensor) -> Tensor:
    """Codes whose first half are the low halves of all bytes: `[rows, blocks, 2 × bytes]`."""
    return torch.cat((stored & 15, stored >> 4), dim=2)


def _paired_nibbles(stored: Tensor) -> Tensor:
    """Codes of which each 32 bytes have two groups: that of their low halves, that of the high ones."""
    chunks = _split(stored, -1, 1, _GROUP)
    return torch.cat((chunks & 15, chunks >> 4), dim=3).flatten(2)


def _bits(stored: Tensor) -> Tensor:
    """Bits of bytes, the lowest first: `[rows, blocks, 8 × bytes]`."""
    return ((stored[:, :, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(2)


def _grouped(bits: int, codes: Tensor, scale: Tensor, *, zero: int = 0, offset: Tensor | None = None) -> GroupIntMatrix:
    """The matrix of codes `[rows, blocks, values]` and a scale for each of equal groups, `[rows, groups]`."""
    codes = codes.flatten(1)
    return GroupIntMatrix(
        bits=bits,
        num_columns=codes.shape[1],
        codes=pack_nibbles(codes) if bits == 4 else codes,
        scale=scale,
        zero=torch.full(scale.shape, zero, dtype=torch.int16),
        group_size=codes.shape[1] // scale.shape[1],
        offset=offset,
    )


def _grouped_k(bits: int, blocks: Tensor, codes: Tensor, *, zero: int = 0) -> GroupIntMatrix:
    """The matrix of a "K" type: scales and minima, six bits each, are multiples of the block's own."""
    packed = _split(blocks[:, :, 4:16], 3, 4)
    low, minima, high = packed.unbind(2)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=2).float()
    offsets = torch.cat((minima & 63, (high >> 4) | ((minima >> 6) << 4)), dim=2).float()
    scale = _half(blocks, 0).float()[:, :, None] * scales
    offset = -(_half(blocks, 2).float()[:, :, None] * offsets)
    return _grouped(bits, codes, scale.flatten(1), zero=zero, offset=offset.flatten(1))
